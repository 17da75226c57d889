"""Reading a program: values are followed through names, functions, loops and classes; branches exclude each other."""

from __future__ import annotations

from shardwise.source.interpreter import read_program
from shardwise.source.syntax import FULLY_SHARD, FileContext
from shardwise.source.trace import Trace
from shardwise.source.values import ProgramEvent

HEADER = "import torch\nimport torch.nn as nn\nfrom torch.distributed.fsdp import fully_shard\n"


def trace_of(text: str) -> Trace:
    """The one run of the program that shards something."""
    (found,) = [trace for trace in read_program(FileContext(HEADER + text)) if trace.shards]
    return found


def calls(trace: Trace, method: str) -> list[ProgramEvent]:
    return [event for event in trace.events if event.method == method]


def test_arguments_reach_the_body_of_a_function_and_results_come_back():
    trace = trace_of(
        "def build():\n    return Model()\n"
        "def wrap(module, mesh=None):\n    fully_shard(module, mesh=mesh)\n    return module\n"
        "first = build()\nsecond = wrap(first, mesh=3)\nsecond(x)\n"
    )
    (shard,) = trace.shards
    (made,) = calls(trace, "build")
    assert made.result == {shard.subject}
    assert [module for _, module in trace.entered if module == shard.subject]
    assert shard.event.keywords.keys() == {"mesh"}


def test_a_builder_called_twice_builds_two_models():
    trace = trace_of("def build():\n    return Model()\na = build()\nb = build()\nfully_shard(a)\nfully_shard(b)\n")
    one, other = (shard.subject for shard in trace.shards)
    assert one != other


def test_attributes_stored_on_self_are_found_in_other_methods():
    trace = trace_of(
        "class T:\n    def __init__(self, model):\n        self.model = model\n        self.wrap()\n"
        "    def wrap(self):\n        fully_shard(self.model)\n"
        "    def run(self, x):\n        self.model(x)\n"
    )
    (shard,) = trace.shards
    entered = [(event, module) for event, module in trace.entered if module == shard.subject]
    assert entered
    assert trace.is_sharded(shard.subject, entered[-1][0])


def test_items_of_a_list_are_parts_of_the_model_that_holds_it():
    trace = trace_of(
        "class B(nn.Module): ...\n"
        "class M(nn.Module):\n    def __init__(self):\n        self.blocks = nn.ModuleList([B() for _ in range(3)])\n"
        "m = M()\nfor block in m.blocks:\n    fully_shard(block)\nfully_shard(m)\n"
    )
    block, model = (shard.subject for shard in trace.shards)
    assert trace.is_part_of(block, model)
    assert not trace.is_part_of(model, block)


def test_enumerate_zip_items_and_indices_give_the_elements():
    text = (
        "for i, a in enumerate(m.layers):\n    fully_shard(a)\n"
        "for b, _ in zip(m.layers, names):\n    fully_shard(b)\n"
        "for k, c in m.layers.items():\n    fully_shard(c)\n"
        "for i in range(4):\n    fully_shard(m.layers[i])\n"
        "for d in reversed(list(m.layers)):\n    fully_shard(d)\n"
    )
    trace = trace_of("m = Model()\n" + text)
    assert len(trace.shards) == 5
    assert len({shard.subject for shard in trace.shards}) == 1


def test_two_indices_are_two_modules():
    trace = trace_of("m = Model()\nfully_shard(m.layers[0])\nfully_shard(m.layers[1])\n")
    assert len({shard.subject for shard in trace.shards}) == 2


def test_keywords_come_out_of_dictionaries_built_in_steps():
    trace = trace_of(
        "kw = dict(mesh=mesh)\nkw['mp_policy'] = policy\nif offload:\n    kw.update(offload_policy=other)\n"
        "fully_shard(Model(), **{**kw, 'reshard_after_forward': False})\n"
    )
    (shard,) = trace.shards
    expected = {"mesh", "mp_policy", "offload_policy", "reshard_after_forward"}
    assert shard.event.keywords.keys() == expected
    assert not shard.event.is_open


def test_unknown_keywords_make_a_call_open():
    trace = trace_of("fully_shard(Model(), **settings)\n")
    assert trace.shards[0].event.is_open


def test_branches_of_one_test_exclude_each_other_and_others_do_not():
    trace = trace_of(
        "m = Model()\nif a and b:\n    fully_shard(m, mesh=1)\nelif a:\n    fully_shard(m, mesh=2)\n"
        "if c == 'x':\n    fully_shard(m, mesh=3)\nif c == 'y':\n    fully_shard(m, mesh=4)\n"
    )
    one, two, three, four = (shard.event for shard in trace.shards)
    assert not trace.precedes(one, two)
    assert not trace.precedes(three, four)
    assert trace.precedes(one, three)
    assert not trace.precedes(three, one)


def test_what_follows_an_early_return_excludes_the_branch_that_returned():
    trace = trace_of(
        "def f(m):\n    if fast:\n        return fully_shard(m, mesh=1)\n    fully_shard(m, mesh=2)\nf(Model())\n"
    )
    one, two = (shard.event for shard in trace.shards)
    assert not trace.precedes(one, two)


def test_names_set_in_both_branches_keep_both_values():
    trace = trace_of("m = A() if x else B()\nfully_shard(m)\n")
    assert len({shard.subject for shard in trace.shards}) == 2


def test_meta_device_is_seen_around_and_in_calls():
    for text in ("with torch.device('meta'):\n    m = Model()\n", "m = Model(device='meta')\n"):
        trace = trace_of(text + "fully_shard(m)\n")
        assert trace.shards[0].subject.on_meta
    trace = trace_of("with torch.device('cuda'):\n    m = Model()\nfully_shard(m)\n")
    assert not trace.shards[0].subject.on_meta


def test_optimizers_know_whose_parameters_they_have():
    trace = trace_of(
        "m = Model()\nfully_shard(m)\n"
        "decay = [p for n, p in m.named_parameters() if 'norm' not in n]\n"
        "torch.optim.AdamW([{'params': decay}, {'params': filter(f, m.parameters())}])\n"
        "torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
    )
    (optimizer,) = trace.optimizers
    assert optimizer.owners == {trace.shards[0].subject}


def test_functions_that_call_themselves_end():
    text = "def f(m, n):\n    fully_shard(m)\n    for c in m.children():\n        f(c, n - 1)\nf(Model(), 3)\n"
    trace = trace_of(text)
    assert trace.calls_to(FULLY_SHARD)


def test_calls_that_branch_at_every_level_stay_within_the_budget():
    functions = "".join(f"def f{i}(m):\n" + f"    f{i + 1}(m)\n" * 9 for i in range(12))
    trace = read_program(FileContext(HEADER + functions + "def f12(m): fully_shard(m)\nf0(Model())\n"))[0]
    assert 0 < len(trace.events) <= 20_000


def test_parts_of_a_compound_test_are_compared_one_by_one():
    trace = trace_of(
        "m = Model()\nif a == 1 and b:\n    fully_shard(m, mesh=1)\nif a == 2:\n    fully_shard(m, mesh=2)\n"
        "if c or not d:\n    raise ValueError\nfully_shard(m, mesh=3)\nif not d:\n    fully_shard(m, mesh=4)\n"
    )
    one, two, three, four = (shard.event for shard in trace.shards)
    assert not trace.precedes(one, two)
    assert not trace.precedes(three, four)
    assert trace.precedes(two, three)
