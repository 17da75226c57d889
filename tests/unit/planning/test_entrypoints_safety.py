"""read_calls: odd code neither stops it nor is run by it, and large models cost no more than small ones."""

import importlib
import linecache

import pytest
import torch
from torch import nn

from shardwise.planning.planner import find_calls, read_calls


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, Block()

    def forward(self, x):
        return self.head(self.inner(x))


def made_without_source() -> nn.Module:
    """A module whose class exists in no file."""
    space = {"nn": nn, "Block": Block}
    exec(
        "class Hidden(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.parts = nn.ModuleList([Block(), Block()])\n"
        "    def forward(self, x):\n"
        "        return self.parts[1](self.parts[0](x))\n",
        space,
    )
    return space["Hidden"]()


def test_a_class_without_source_is_named_and_its_parts_count_as_called():
    calls = read_calls(Outer(made_without_source()))
    assert calls.unreadable == ("Hidden",)
    assert any("Hidden" in note for note in calls.notes)
    assert {"inner", "inner.parts.0", "inner.parts.1.linear", "head.linear"} <= calls.called
    assert not calls.is_known("inner.parts.0")
    assert not calls.bypassed


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.me = [self]

    def helper(self, x, depth):
        return self.helper(x, depth - 1) if depth else self.other(x)

    def other(self, x):
        walk = lambda f, n: f(walk, n - 1) if n else self.linear(x)  # noqa: E731
        return walk(walk, 3) + self.helper(x, 0)

    def forward(self, x):
        while x.sum() > 0:
            x = self.helper(x, 5) if self.me[0] is self else self.me[0](x)
        return x


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = {"a": self.linear, 3: None}

    def __getattr__(self, name):
        return super().__getattr__(name)

    def forward(self, x, *args, **kwargs):
        a, *b = args or [1]
        match x:
            case torch.Tensor() if kwargs:
                x = self.linear(x)
            case [y, *rest]:
                x = [self.linear(z) for z in (y, *rest) if z is not None]
            case _:
                pass
        try:
            x = {**kwargs, "k": self.table["a"](x)}["k"]
        except (KeyError, ValueError) as error:
            raise RuntimeError from error
        finally:
            del a
        global _nothing
        _nothing = x[..., ::2]
        for k in {*b}:
            x += k
        else:
            x = (lambda *xs, q=1, **rest: xs[0] * q)(x, q=2)
        with torch.no_grad() as g, torch.enable_grad():
            x = x if g else -x
        return f"{x!r:>{10}}" and (x := x @ 1 if False else ~x)


@pytest.mark.parametrize("kind", [Recursive, Odd])
def test_odd_code_is_read_without_raising(kind):
    calls = read_calls(Outer(kind()))
    assert {"inner", "inner.linear", "head", "head.linear"} <= calls.called
    assert not calls.unreadable


def test_no_code_of_the_model_runs():
    class Trap(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @property
        def chosen(self):
            raise AssertionError("a property ran")

        def __len__(self):
            raise AssertionError("__len__ ran")

        def __bool__(self):
            raise AssertionError("__bool__ ran")

        def __iter__(self):
            raise AssertionError("__iter__ ran")

        def __getattr__(self, name):
            if name in ("linear", "forward"):
                return super().__getattr__(name)
            raise AssertionError(f"__getattr__({name}) ran")

        def forward(self, x):
            if self and hasattr(self, "chosen") and len(self) and isinstance(self.chosen, Trap):
                for part in self:
                    x = part(x)
            return self.linear(x) + self.absent

    assert "inner.linear" in read_calls(Outer(Trap())).called


def test_endless_code_gives_up_on_its_class_alone():
    class Endless(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Block()

    # Sixty methods, each calling the next twice with ever new arguments: 2**60 paths.
    step = "def f{0}(self, x, *a):\n    self.f{1}(x, *a, {0})\n    self.f{1}(x, *a, 'b')"
    source = "\n".join(step.format(i, i + 1) for i in range(60))
    namespace: dict = {}
    filename = "endless_for_a_test"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), namespace)
    for i in range(60):
        setattr(Endless, f"f{i}", namespace[f"f{i}"])
    Endless.f60 = lambda self, x, *a: self.part(x)
    Endless.forward = lambda self, x: self.f0(x)
    calls = read_calls(Outer(Endless()))  # returning at all is the point
    assert len(calls.unreadable) == 1
    assert calls.unreadable[0].endswith("Endless")
    assert {"inner.part.linear", "head.linear"} <= calls.called


def test_layers_of_one_class_cost_one_reading_but_keep_their_differences():
    class Alternating(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.index = index
            self.even, self.odd = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.even(x) if self.index % 2 == 0 else self.odd.forward(x)

    class Model(nn.Module):
        def __init__(self, num_layers):
            super().__init__()
            self.layers = nn.ModuleList([Alternating(i) for i in range(num_layers)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    calls = read_calls(Model(6))
    assert {f"layers.{i}.even" for i in (0, 2, 4)} <= calls.called
    assert calls.methods == {f"layers.{i}.odd": {"forward"} for i in (1, 3, 5)}


def test_every_block_of_the_largest_llama_is_read():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    calls = read_calls(model)
    assert len([name for name in calls.called if name.endswith("q_proj")]) == 126
    assert not calls.bypassed
    assert not calls.foreign_reads
    assert not calls.repeated


def test_tracing_has_the_last_word_on_the_forward_and_reading_on_the_rest():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Outer(Block()), Outer(Block())

        def forward(self, x, fast=False):
            if fast:
                return self.a.inner(x)
            return self.b(self.a(x))

        def encode(self, x):
            return self.b.head(x)

    read = read_calls(Model())
    assert read.bypassed == {"a": {"a.inner"}, "b": {"b.head"}}
    both = find_calls(Model(), torch.ones(2, 4))
    assert both.complete
    assert both.bypassed == {"b": {"b.head"}}
    assert both.public_methods == ("encode",)
    fast = find_calls(Model(), {"x": torch.ones(2, 4), "fast": True})
    assert fast.bypassed == {"a": {"a.inner"}, "b": {"b.head"}}


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x, steps: int):
        for _ in range(steps):
            x = self.inner(x)
        return x


@pytest.mark.parametrize("steps", [1, 2])
def test_a_trace_says_how_often_a_module_runs(steps):
    inputs = {"x": torch.ones(2, 4), "steps": steps}
    assert find_calls(Steps()).repeated == {"inner", "inner.linear"}
    assert find_calls(Steps(), inputs).repeated == ({"inner", "inner.linear"} if steps > 1 else set())


def test_a_file_edited_after_its_import_is_not_read_for_the_old_code(tmp_path, monkeypatch):
    source = (
        "from torch import nn\n\nclass Old(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        return self.second(self.first(x))\n"
    )
    file = tmp_path / "edited_model.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("edited_model").Old()
    file.write_text(source.replace("self.second(self.first(x))", "self.third(x)"))
    linecache.checkcache()
    calls = find_calls(model)
    assert calls.unreadable == ("Old",)
    assert {"first", "second"} <= calls.called


def test_a_file_that_no_longer_parses_does_not_stop_the_reader(tmp_path, monkeypatch):
    source = "from torch import nn\n\nclass Cut(nn.Linear):\n    def public(self, x):\n        return self(x)\n"
    file = tmp_path / "cut_model.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("cut_model").Cut(4, 4)
    file.write_text(source.replace("self(x)", "'''"))
    linecache.checkcache()
    assert find_calls(model).public_methods == ()
