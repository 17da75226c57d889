"""What becomes of state-dict code, by its text: no-op cases first."""

from __future__ import annotations

import ast

import pytest

from shardwise.findings import SourceFinding, Status
from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import rewrite

HEADER = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
"""
CONFIG = "FullStateDictConfig(offload_to_cpu=True, rank0_only=True)"
FULL = f"FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, {CONFIG})"
LOCAL = "FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT)"
WHOLE = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
CODES = {"SW110", "SW111", "SW112", "SW113"}


def migrate(body: str, **others: str) -> tuple[str, list[SourceFinding]]:
    """The body after migration, and what was said about its state dicts."""
    text = HEADER + body
    program = Program({"main.py": text, **{f"{name}.py": other for name, other in others.items()}})
    new, notes = rewrite(program.file("main.py"), program, "torch")
    ast.parse(new)
    again = Program({"main.py": new})
    assert rewrite(again.file("main.py"), again, "torch")[0] == new, "a second run changes it"
    return new, [note for note in notes if note.code in CODES]


@pytest.mark.parametrize(
    "body",
    [
        "def save(model):\n    return model.state_dict()\n",
        "def save(model, optimizer):\n    return optimizer.state_dict()\n",
        "model = build()\nmodel.load_state_dict(state)\nmodel = FSDP(model)\n",
        "def save(model):\n    if isinstance(model, FSDP):\n        return None\n    return model.state_dict()\n",
        "model = FSDP(build())\nstate = None if args.fsdp else model.state_dict()\n",
        "model = FSDP(build())\nif not use_fsdp:\n    state = model.state_dict()\n",
    ],
    ids=["plain", "optimizer", "before", "left", "other-branch", "negated"],
)
def test_state_dicts_of_other_models_are_left_alone(body: str):
    new, notes = migrate(body)
    assert notes == []
    assert "get_model_state_dict" not in new


def test_a_context_is_dissolved_and_its_body_moves_out_unchanged():
    body = f'''
def save(model, path, rank):
    with {FULL}:  # gather
        # every rank takes part
        state = model.state_dict()

        if rank == 0:
            text = """kept
        as it is"""
            torch.save(state, path)  # done
    return text
'''
    new, notes = migrate(body)
    expected = f'''
def save(model, path, rank):
    # gather
    # every rank takes part
    state = {WHOLE}

    if rank == 0:
        text = """kept
        as it is"""
        torch.save(state, path)  # done
    return text
'''
    assert new.endswith(expected)
    assert [(note.code, note.status) for note in notes] == [("SW110", Status.REWRITTEN)]
    assert "FullStateDictConfig" not in new


def test_nested_contexts_and_other_items_are_kept():
    body = f"""
def save(model, ema):
    with torch.no_grad(), {FULL}:
        with FSDP.state_dict_type(ema, StateDictType.SHARDED_STATE_DICT):
            one = model.state_dict()
            two = ema.state_dict()
    return one, two
"""
    new, _ = migrate(body)
    assert new.endswith(
        f"""
def save(model, ema):
    with torch.no_grad():
        one = {WHOLE}
        two = get_model_state_dict(ema)
    return one, two
"""
    )


def test_tabs_and_windows_line_ends_survive():
    body = f"def save(model):\n\twith {FULL}:\n\t\tstate = model.state_dict()\n\t\tprint(state)\n\treturn state\n"
    program = Program({"main.py": (HEADER + body).replace("\n", "\r\n")})
    new, _ = rewrite(program.file("main.py"), program, "torch")
    assert new.endswith(f"def save(model):\r\n\tstate = {WHOLE}\r\n\tprint(state)\r\n\treturn state\r\n")


def test_a_policy_that_nobody_uses_any_more_goes_too():
    body = """
policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


def save(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
        return model.state_dict()
"""
    assert "policy" not in migrate(body)[0]
    assert "policy = FullStateDictConfig" in migrate(body, other="from main import policy\n")[0]
    assert WHOLE in migrate(body)[0]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (f"def f(model):\n    with {LOCAL}:\n        model.state_dict()\n", "SW113"),
        (f"def f(model, trainer):\n    with {FULL}:\n        trainer.save_model()\n", "SW110"),
        (f"def f(model):\n    with {FULL}:\n        write(model)\n        x = model.state_dict()\n", "SW110"),
        (f"def f(model):\n    if rank == 0:\n        with {FULL}:\n            x = model.state_dict()\n", "SW110"),
        (f"def f(model):\n    with {FULL}: x = model.state_dict()\n", "SW110"),
        (f"def f(model):\n    context = {FULL}\n    with context:\n        x = model.state_dict()\n", "SW110"),
        (f"def f(model):\n    with {FULL}:\n        x = model.state_dict(prefix='a.')\n", "SW110"),
        ("def f(model):\n    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)\n", "SW110"),
        ("model = FSDP(build())\nif rank == 0:\n    torch.save(model.state_dict(), 'x')\n", "SW111"),
        ("def f(model, optim, osd):\n    return FSDP.optim_state_dict_to_load(model, optim, osd)\n", "SW112"),
        ("def f(osd, model):\n    return FSDP.rekey_optim_state_dict(osd, KEY, model)\n", "SW112"),
        ("def f(model, optim):\n    return FSDP.optim_state_dict(model, optim, group=g)\n", "SW112"),
        ("def f(model, optim, osd):\n    s = FSDP.scatter_full_optim_state_dict(osd, model)\n    print(s)\n", "SW112"),
    ],
)  # fmt: skip
def test_what_a_person_must_decide_stays_with_a_reason(body: str, code: str):
    new, notes = migrate(body)
    assert [(note.code, note.status) for note in notes] == [(code, Status.NEEDS_DECISION)]
    assert notes[0].fix
    assert "get_model_state_dict" not in new
    assert "optimizer_state_dict" not in new


def test_a_type_set_elsewhere_leaves_plain_calls_to_a_person():
    body = """
def build(net):
    model = FSDP(net)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def save(model: FSDP):
    return model.state_dict()
"""
    _, notes = migrate(body)
    assert [note.status for note in notes] == [Status.NEEDS_DECISION] * 2


def test_models_that_may_be_plain_get_code_for_both():
    body = """
class Trainer:
    def __init__(self, net):
        self.model = FSDP(net) if cfg.shard else net

    def save(self):
        return self.model.state_dict()

    def load(self, state):
        return self.model.load_state_dict(state, strict=False)
"""
    new, notes = migrate(body)
    assert "return _whole_state(self.model)\n" in new
    assert "return _load_whole_state(self.model, state, strict=False)\n" in new
    assert [note.status for note in notes] == [Status.REWRITTEN] * 2


def test_an_optimizer_loaded_with_and_without_fsdp_gets_code_for_both():
    body = """
def resume(model, optimizer, checkpoint, args):
    osd = checkpoint["optimizer"]
    if args.fsdp:
        osd = FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=osd)
    optimizer.load_state_dict(osd)
"""
    new, _ = migrate(body)
    assert new.endswith(
        """
def resume(model, optimizer, checkpoint, args):
    osd = checkpoint["optimizer"]
    if args.fsdp:
        pass
    _load_optimizer(model, optimizer, osd, full_state_dict=True)
"""
    )


@pytest.mark.parametrize(
    "arguments", ["model, optim, osd", "osd, model, optim", "optim_state_dict=osd, model=model, optim=optim"]
)
def test_both_orders_of_the_arguments_are_understood(arguments: str):
    body = f"def f(model, optim, osd):\n    optim.load_state_dict(FSDP.optim_state_dict_to_load({arguments}))\n"
    new, _ = migrate(body)
    assert "    set_optimizer_state_dict(model, optim, osd, options=StateDictOptions(full_state_dict=True))\n" in new


@pytest.mark.parametrize("indent", ["        ", "    "], ids=["inside", "behind"])
def test_sharded_optimizer_state_is_read_into_shards(indent: str):
    body = f"""
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict


def load(model, optim, reader):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {{"model": model.state_dict()}}
        read = load_sharded_optimizer_state_dict(
            model_state_dict=model.state_dict(), optimizer_key="o", storage_reader=reader
        )
{indent}flat = FSDP.optim_state_dict_to_load(model, optim, read["o"])
{indent}optim.load_state_dict(flat)
"""
    new, notes = migrate(body)
    assert '    read = _read_optimizer_state(model, optim, "o", reader)\n' in new
    assert "    set_optimizer_state_dict(model, optim, flat)\n" in new
    assert "load_sharded_optimizer_state_dict" not in new
    assert {note.status for note in notes} == {Status.REWRITTEN}


def test_a_name_of_the_function_itself_is_not_taken_for_ours():
    body = f"""
def save(model, is_new):
    if is_new:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return get_model_state_dict(model)
    with {FULL}:
        return model.state_dict()
"""
    _, notes = migrate(body)
    assert [note.status for note in notes] == [Status.NEEDS_DECISION]


def options(*names: str) -> str:
    return f", options=StateDictOptions({', '.join(f'{name}=True' for name in names)})" if names else ""


FULL_OPTION, BOTH, CPU = options("full_state_dict"), options("full_state_dict", "cpu_offload"), options("cpu_offload")


@pytest.mark.parametrize(
    ("configs", "model", "optimizer"),
    [
        (
            "FULL_STATE_DICT",
            f"get_model_state_dict(m{FULL_OPTION})",
            f"_on_cpu(get_optimizer_state_dict(m, o{FULL_OPTION}))",
        ),
        ("SHARDED_STATE_DICT", "get_model_state_dict(m)", f"get_optimizer_state_dict(m, o{CPU})"),
        (
            "FULL_STATE_DICT, FullStateDictConfig(True, True), FullOptimStateDictConfig(rank0_only=True)",
            f"get_model_state_dict(m{BOTH})",
            f"get_optimizer_state_dict(m, o{BOTH})",
        ),
        (
            "FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True), FullOptimStateDictConfig(False, True)",
            f"_on_cpu(get_model_state_dict(m{FULL_OPTION}))",
            f"_on_rank0(get_optimizer_state_dict(m, o{FULL_OPTION}))",
        ),
        (
            "SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(False)",
            f"get_model_state_dict(m{CPU})",
            "get_optimizer_state_dict(m, o)",
        ),
    ],
)
def test_types_and_configs_become_options(configs: str, model: str, optimizer: str):
    body = f"""
from torch.distributed.fsdp import FullOptimStateDictConfig, ShardedOptimStateDictConfig, ShardedStateDictConfig


def save(m, o):
    with FSDP.state_dict_type(m, StateDictType.{configs}):
        one = m.state_dict()
        two = FSDP.optim_state_dict(m, o)
    return one, two
"""
    new, _ = migrate(body)
    assert f"    one = {model}\n    two = ({optimizer} if o.state else {{}})\n" in new


@pytest.mark.parametrize(
    ("made", "switches"),
    [
        ("FSDP.scatter_full_optim_state_dict(osd, m, optim=o)", ("full_state_dict", "broadcast_from_rank0")),
        ("FSDP.shard_full_optim_state_dict(osd, m, optim=o)", ("full_state_dict",)),
        ("FSDP.flatten_sharded_optim_state_dict(osd, m, o)", ()),
    ],
)
def test_older_loads_say_who_has_the_state(made: str, switches: tuple[str, ...]):
    new, _ = migrate(f"def load(m, o, osd):\n    o.load_state_dict({made})\n")
    assert f"    set_optimizer_state_dict(m, o, osd{options(*switches)})\n" in new


def test_a_config_that_only_the_run_knows_is_kept_for_it():
    body = """
def save(model, only):
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=only)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict()
"""
    new, _ = migrate(body)
    assert "    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=only)\n" in new
    assert "    return _model_state(model, kind=StateDictType.FULL_STATE_DICT, config=config)\n" in new


def test_models_are_followed_through_functions_classes_and_modules():
    main = HEADER + (
        "from saving import Saver, save\n\n\n"
        "def main(net):\n    model = FSDP(net)\n    run(model)\n    Saver(model).go()\n\n\n"
        "def run(inner):\n    save('x', what=inner)\n"
    )
    saving = (
        "import torch\n\n\ndef save(path, what):\n    torch.save(what.state_dict(), path)\n\n\n"
        "def other(what):\n    return what.state_dict()\n\n\n"
        "class Saver:\n    def __init__(self, model):\n        self.model = model\n\n"
        "    def go(self):\n        return self.model.state_dict()\n"
    )
    program = Program({"main.py": main, "saving.py": saving})
    new, notes = rewrite(program.file("saving.py"), program, "torch")
    assert "    torch.save(_whole_state(what), path)\n" in new
    assert "        return _whole_state(self.model)\n" in new
    assert "def other(what):\n    return what.state_dict()\n" in new
    assert [note.code for note in notes] == ["SW111", "SW111"]


@pytest.mark.parametrize(
    ("group", "test", "expected"),
    [
        ("", "dp_rank == 0", WHOLE),
        ("process_group=group", "dist.get_rank() == 0", WHOLE),
        ("process_group=group", "dp_rank == 0", "_on_first_rank(model, offload=True)"),
        ("process_group=group", "dist.get_rank(group=group) == 0", "_on_first_rank(model, offload=True)"),
        ("sharding_strategy=strategy", "local_rank != 0", "_on_first_rank(model, offload=True)"),
    ],
)
def test_the_first_rank_of_each_group_has_the_state_as_with_fsdp1(group: str, test: str, expected: str):
    body = f"\nmodel = FSDP(build(), {group})\n\n\ndef save():\n    with {FULL}:\n        state = model.state_dict()\n"
    new, _ = migrate(body + f"    if {test}:\n        torch.save(state, path)\n")
    assert f"    state = {expected}\n" in new


def test_a_setting_around_the_state_of_an_optimizer_alone_goes():
    body = f"def save(model, opt):\n    with {LOCAL}:\n        torch.save(opt.state_dict(), path)\n"
    new, notes = migrate(body)
    assert new.endswith("def save(model, opt):\n    torch.save(opt.state_dict(), path)\n")
    assert [(note.code, note.status) for note in notes] == [("SW110", Status.REWRITTEN), ("SW112", Status.REPORTED)]


@pytest.mark.parametrize("other", ["self.save()", "finish(path)", "ema.state_dict()"])
def test_a_setting_that_may_reach_a_model_stays(other: str):
    body = f"def finish(path):\n    pass\n\n\ndef save(self, model, opt):\n    with {LOCAL}:\n"
    new, notes = migrate(body + f"        torch.save(opt.state_dict(), path)\n        {other}\n")
    assert f"with {LOCAL}:" in new
    assert [(note.code, note.status) for note in notes][:1] == [("SW110", Status.NEEDS_DECISION)]


def test_the_state_that_an_optimizer_has_anyway_need_not_be_given():
    call = "FSDP.optim_state_dict(model=model, optim=self.opt, optim_state_dict=self.opt.state_dict())"
    new, notes = migrate(f"def save(self, model):\n    return {call}\n")
    assert "return (_on_cpu(get_optimizer_state_dict(_reshard(model), self.opt, " in new
    assert [(note.code, note.status) for note in notes] == [("SW112", Status.REWRITTEN)]
