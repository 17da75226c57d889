"""Names mean what Python would make of them; text and positions survive any encoding."""

from __future__ import annotations

import ast

import pytest

from shardwise.errors import SourceError
from shardwise.source.syntax import FileContext, canonical, decode

FULLY_SHARD = "torch.distributed.fsdp.fully_shard"


def origins_of_calls(text: str) -> list[set[str]]:
    file = FileContext(text)
    return [set(file.callee(call).origins) for call in file.calls]


@pytest.mark.parametrize(
    "text",
    [
        "from torch.distributed.fsdp import fully_shard\nfully_shard(m)",
        "from torch.distributed.fsdp import fully_shard as fs\nfs(m)",
        "import torch.distributed.fsdp as f\nf.fully_shard(m)",
        "import torch\ntorch.distributed.fsdp.fully_shard(m)",
        "from torch.distributed import fsdp\nfsdp.fully_shard(m)",
        "from torch.distributed._composable.fsdp import fully_shard\nfully_shard(m)",
        "from torch.distributed._composable.fsdp.fully_shard import fully_shard\nfully_shard(m)",
        "from torch.distributed._composable import fully_shard\nfully_shard(m)",
        "from torch.distributed.fsdp._fully_shard import fully_shard\nfully_shard(m)",
        "from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard\nfully_shard(m)",
        "from torch.distributed.fsdp import *\nfully_shard(m)",
        "from torch.distributed.fsdp import fully_shard\nshard = fully_shard\nshard(m)",
        "def f():\n    from torch.distributed.fsdp import fully_shard\n    fully_shard(m)",
        "try:\n    from torch.distributed.fsdp import fully_shard\nexcept ImportError:\n    ...\nfully_shard(m)",
    ],
)
def test_every_spelling_of_fully_shard_is_recognised(text: str):
    assert origins_of_calls(text)[-1] == {FULLY_SHARD}


@pytest.mark.parametrize(
    "text",
    [
        "fully_shard(m)",
        "from my_library import fully_shard\nfully_shard(m)",
        "from .fsdp import fully_shard\nfully_shard(m)",
        "from torch.distributed.fsdp import fully_shard\ndef f(fully_shard):\n    fully_shard(m)",
        "from torch.distributed.fsdp import fully_shard\nclass A:\n    def fully_shard(self): ...\nA().fully_shard(m)",
    ],
)
def test_other_functions_of_the_same_name_are_not(text: str):
    assert FULLY_SHARD not in set().union(*origins_of_calls(text))


def test_partial_counts_as_the_function_with_its_arguments():
    file = FileContext(
        "from functools import partial\nfrom torch.distributed.fsdp import fully_shard\n"
        "shard = partial(fully_shard, mesh=mesh)\nshard(model)\n"
    )
    callee = file.callee(file.calls[-1])
    assert callee.origins == {FULLY_SHARD}
    assert [keyword.arg for keyword in callee.keywords] == ["mesh"]


def test_names_that_refer_to_each_other_end():
    assert origins_of_calls("a = b\nb = a\na()") == [set()]
    many = "import x\n" + "y = x if c else y\n" * 40 + "y()"
    assert origins_of_calls(many) == [{"x"}]


def test_both_sides_of_a_conditional_are_kept():
    text = "import a, b\nf = a.x if c else b.y\nf()"
    assert origins_of_calls(text) == [{"a.x", "b.y"}]


def test_class_names_are_not_seen_from_methods():
    text = "import a\nclass C:\n    f = a.x\n    def m(self):\n        f()\n"
    assert origins_of_calls(text) == [set()]


def test_defaults_and_decorators_belong_to_the_scope_outside():
    text = "import a\n@a.deco()\ndef f(a, b=a.make()):\n    a.other()\n"
    assert origins_of_calls(text) == [{"a.deco"}, {"a.make"}, set()]


def test_positions_count_characters_not_bytes():
    file = FileContext("é = 'ü'; call(é)\n")
    (call,) = file.calls
    start, end = file.positions.span(call)
    assert file.text[start:end] == "call(é)"
    assert file.positions.column(1, start) == 10


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_positions_hold_for_every_line_end_and_form_feeds(end: str):
    file = FileContext(end.join(["x = 1", "\x0cy = f(", "  2)", ""]))
    (call,) = file.calls
    start, stop = file.positions.span(call)
    assert file.text[start:stop] == f"f({end}  2)"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "cp1252"])
def test_decode_follows_marks_and_coding_lines(encoding: str):
    header = "" if encoding.startswith("utf") else f"# -*- coding: {encoding} -*-\n"
    text, found = decode((header + "name = 'é'\n").encode(encoding), "a.py")
    assert text.endswith("name = 'é'\n")
    assert text.encode(found) == (header + "name = 'é'\n").encode(encoding)


@pytest.mark.parametrize("data", [b"x = '\xff'\n", b"# coding: latin-9000\n", b"# coding: ascii\nx = '\xe9'\n"])
def test_decode_refuses_what_is_not_in_its_encoding(data: bytes):
    with pytest.raises(SourceError, match="cannot be decoded") as caught:
        decode(data, "a.py")
    assert caught.value.where.startswith("a.py:")


@pytest.mark.parametrize("text", ["def f(:\n", "x = \x00", "print 'python 2'\n", "(" * 500 + ")" * 500])
def test_text_that_is_not_python_is_a_source_error(text: str):
    with pytest.raises(SourceError) as caught:
        FileContext(text, "a.py")
    assert caught.value.where.startswith("a.py:")


def test_canonical_leaves_other_names_alone():
    assert canonical("numpy.linalg.norm") == "numpy.linalg.norm"
    assert canonical("torch.optim.adamw.AdamW") == "torch.optim.AdamW"
    assert canonical("torch.nn.modules.linear.Linear") == "torch.nn.Linear"
    assert canonical("torch.optim.lr_scheduler.StepLR") == "torch.optim.lr_scheduler.StepLR"


def test_statement_and_function_around_a_node():
    file = FileContext("class A:\n    def f(self):\n        return g(1)\n")
    (call,) = file.calls
    assert isinstance(file.statement(call), ast.Return)
    function = file.enclosing_function(call)
    assert function is not None
    assert function.name == "f"
    owner = file.enclosing_class(call)
    assert owner is not None
    assert owner.name == "A"
