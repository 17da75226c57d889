"""A wrapped model is followed wherever it goes, in whatever order files and functions stand; no-op cases first."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shardwise.findings import SourceFinding, Status
from shardwise.fsdp1.codemod.migrate import migrate as migrate_files
from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import rewrite

IMPORTS = "import copy\nimport torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n\n\n"


def migrate(*bodies: str, **files: str) -> tuple[str, list[SourceFinding]]:
    """The first text after migration with the others, and all findings in it."""
    texts = {"main.py": IMPORTS + "".join(bodies), **{f"{name}.py": text for name, text in files.items()}}
    program = Program(texts)
    return rewrite(program.file("main.py"), program, "torch")


def codes(findings: list[SourceFinding], status: Status | None = None) -> list[str]:
    return [one.code for one in findings if status in (None, one.status)]


LOADS = {
    "before": "def run():\n    model = make()\n    model.load_state_dict(s)\n    model = FSDP(model)\n",
    "before_a_check": "def run(model):\n    model.load_state_dict(s)\n    if sharded:\n        model = FSDP(model)\n"
    "    if isinstance(model, FSDP):\n        print(model)\n    return model\n",
    "in_a_helper_called_before": "def load(model):\n    model.load_state_dict(s)\n\n\ndef run():\n    model = build()\n"
    "    load(model)\n    return FSDP(model)\n",
    "of_another_class": "class One:\n    def __init__(self):\n        self.model = FSDP(build())\n\n\nclass Two:\n"
    "    def __init__(self):\n        self.model = build()\n        self.model.load_state_dict(s)\n",
    "branch_that_returns": "def run(model):\n    if sharded:\n        model = FSDP(model)\n        return model\n"
    "    model.load_state_dict(s)\n    return model\n",
}


BRANCHES = (
    "def run(models):\n    if new:\n        for i, model in enumerate(models):\n            out = model.state_dict()\n"
)
BRANCHES += (
    "    else:\n        for i, model in enumerate(models):\n            models[i] = FSDP(model)\n    return models\n"
)


def test_item_that_the_other_branch_wraps_is_left_alone():
    text, findings = migrate(BRANCHES)
    assert "out = model.state_dict()" in text
    assert codes(findings) == ["SW132", "SW101"]


@pytest.mark.parametrize("name", LOADS)
def test_load_into_a_model_that_is_not_wrapped_yet_is_left_alone(name: str):
    text, findings = migrate(LOADS[name])
    assert "model.load_state_dict(s)" in text
    assert "SW111" not in codes(findings)


WRAP = "def wrap():\n    return FSDP(build())\n\n\n"
SAVES = {
    "attribute_chain": "class Run:\n    def __init__(self, policy):\n        self.policy = policy\n"
    "        self.policy.v_head = FSDP(policy.v_head)\n\n    def save(self):\n"
    "        return self.policy.v_head.state_dict()\n",
    "part_of_the_model": "class Run:\n    def __init__(self, policy):\n        self.policy = FSDP(policy)\n\n"
    "    def save(self):\n        return self.policy.v_head.state_dict()\n",
    "dictionary": WRAP
    + "state = {'model': wrap(), 'step': 0}\n\n\ndef save():\n    return state['model'].state_dict()\n",
    "dictionary_filled_later": WRAP + "state = {}\nstate['model'] = wrap()\nout = state.get('model').state_dict()\n",
    "list": WRAP + "models = []\nmodels.append(wrap())\nfor one in models:\n    out = one.state_dict()\n",
    "returned_pair": "def make():\n    return FSDP(build()), 1\n\n\nmodel, step = make()\nout = model.state_dict()\n",
    "function_before_its_caller": "def save(model):\n    return model.state_dict()\n\n\n" + WRAP + "save(wrap())\n",
    "closure": WRAP
    + "def outer():\n    model = wrap()\n\n    def save():\n        return model.state_dict()\n    return save\n",
    "keyword_arguments": "def save(**parts):\n    return parts['model'].state_dict()\n\n\n"
    + WRAP
    + "save(model=wrap())\n",
    "object_handed_on": "def save(run):\n    return run.model.state_dict()\n\n\n" + WRAP + "run = Namespace()\n"
    "run.model = wrap()\nsave(run)\n",
    "base_class": "class Base:\n    def save(self):\n        return self.model.state_dict()\n\n\nclass Mine(Base):\n"
    "    def __init__(self):\n        self.model = FSDP(build())\n",
    "property": "class Run:\n    def __init__(self):\n        self._model = FSDP(build())\n\n    @property\n"
    "    def model(self):\n        return self._model.module\n\n    def save(self):\n"
    "        return self.model.state_dict()\n",
    "method_of_an_object": WRAP + "class Saver:\n    def save(self, net):\n        return net.state_dict()\n\n\n"
    "def run(saver):\n    saver.save(wrap())\n",
    "same_model_under_its_old_name": "def run(net):\n    model = FSDP(net)\n    return net.state_dict(), model\n",
    "copy": WRAP + "ema = copy.deepcopy(wrap())\nout = ema.state_dict()\n",
    "compiled": WRAP + "model = torch.compile(wrap())\nout = model._orig_mod.state_dict()\n",
    "unknown_function_gives_it_back": WRAP + "def run():\n    model = wrap()\n    model = prepare(model)\n"
    "    return model.state_dict()\n",
}


@pytest.mark.parametrize("name", SAVES)
def test_state_dict_of_a_model_that_came_by(name: str):
    text, findings = migrate(SAVES[name])
    assert "SW111" in codes(findings), text


RUN = "class Run:\n    def __init__(self, model):\n        self.model = model\n\n"
RUN += "    def save(self):\n        return self.model.state_dict()\n\n\n"
FROM_OUTSIDE = {
    "class_of_the_file": "from other import Run\n\n\nrun = Run(build())\nrun.model = FSDP(run.model)\n",
    "class_that_a_library_makes": "import other, library\n\n\nrun = library.make()\nrun.model = FSDP(run.model)\n",
    "handed_in": "import other\n\n\ndef shard(run):\n    run.model = FSDP(run.model)\n",
    "from_a_list": "import other\n\n\ndef shard(runs):\n    for run in runs:\n        run.model = FSDP(run.model)\n",
    "by_setattr": "import other\n\n\ndef shard(run):\n    setattr(run, 'model', FSDP(run.model))\n",
    "of_a_part": "import other\n\n\ndef shard(app):\n    app.run.model = FSDP(app.run.model)\n",
}


@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_attribute_that_is_set_from_outside_is_seen_inside_the_class(name: str):
    program = Program({"main.py": IMPORTS + FROM_OUTSIDE[name], "other.py": RUN, "unrelated.py": RUN})
    text, findings = rewrite(program.file("other.py"), program, "torch")
    assert "return _whole_state(self.model)" in text
    assert codes(findings) == ["SW111"]
    assert rewrite(program.file("unrelated.py"), program, "torch")[0] == RUN


def test_function_that_shards_an_attribute_of_its_caller_is_followed_there():
    use = "from main import shard\n\n\n" + RUN.replace("= model\n", "= model\n        shard(self)\n")
    program = Program({"main.py": IMPORTS + "def shard(run):\n    run.model = FSDP(run.model)\n", "use.py": use})
    assert "return _whole_state(self.model)" in rewrite(program.file("use.py"), program, "torch")[0]


BUILD = IMPORTS + "def build():\n    return {'model': FSDP(torch.nn.Linear(2, 2))}\n"
SAVE = "def save(state, path):\n    torch.save(state['model'].state_dict(), path)\n"
MAIN = "import torch\nfrom build import build\nfrom save import save\n\nstate = build()\nsave(state, 'path')\n"
UNRELATED = IMPORTS + "def save(model):\n    return model\n\n\nmodel = FSDP(torch.nn.Linear(1, 1))\n"


@pytest.mark.parametrize("order", list(itertools.permutations(["build", "save", "main", "unrelated"]))[::5])
def test_files_are_read_in_any_order_beside_any_other(order: tuple[str, ...]):
    files = {"build": BUILD, "save": "import torch\n\n\n" + SAVE, "main": MAIN, "unrelated": UNRELATED}
    program = Program({f"{name}.py": files[name] for name in order})
    text, findings = rewrite(program.file("save.py"), program, "torch")
    assert "torch.save(_whole_state(state['model']), path)" in text
    assert codes(findings) == ["SW111"]


RANKS = {
    "and": "if rank == 0 and is_last:\n    torch.save(model.state_dict(), path)\n",
    "nested": "if is_last:\n    if dist.get_rank() == 0:\n        torch.save(model.state_dict(), path)\n",
    "returned": "def save(model, rank):\n    if rank != 0:\n        return\n"
    "    torch.save(model.state_dict(), path)\n\n\nsave(model, 0)\n",
    "expression": "state = model.state_dict() if rank == 0 else None\n",
    "else": "if rank != 0:\n    pass\nelse:\n    torch.save(model.state_dict(), path)\n",
    "other_ranks": "if rank != 0:\n    state = model.state_dict()\n",
    "while": "while rank == 0:\n    torch.save(model.state_dict(), path)\n",
    "assert": "def save(model, rank):\n    assert rank == 0\n    torch.save(model.state_dict(), path)\n"
    "\n\nsave(model, 0)\n",
    "exit": "def save(model, rank):\n    if rank > 0:\n        sys.exit()\n    torch.save(model.state_dict(), path)\n"
    "\n\nsave(model, 0)\n",
    "decorator": "@rank_zero_only\ndef save(model):\n    torch.save(model.state_dict(), path)\n\n\nsave(model)\n",
    "named": "is_first = dist.get_rank() == 0\nif is_first:\n    torch.save(model.state_dict(), path)\n",
    "caller": "def save(model):\n    torch.save(model.state_dict(), path)\n\n\nif is_main_process():\n"
    "    save(model)\n",
    "callers": "def save(model):\n    torch.save(model.state_dict(), path)\n\n\ndef end(model):\n    save(model)\n\n\n"
    "if rank == 0:\n    end(model)\nif rank == 0 and is_last:\n    save(model)\n",
    "device": "if self.device == 0:\n    torch.save(model.state_dict(), path)\n",
    "main_process": "if args.is_main_process and done:\n    torch.save(model.state_dict(), path)\n",
}


@pytest.mark.parametrize("name", RANKS)
def test_state_dict_on_one_rank_does_not_become_a_collective(name: str):
    text, findings = migrate("model = FSDP(build())\n", RANKS[name])
    assert "model.state_dict()" in text
    assert codes(findings, Status.NEEDS_DECISION) == ["SW111"]


def test_state_dict_that_both_branches_of_a_test_for_the_rank_take_is_gathered():
    _, findings = migrate(
        "model = FSDP(build())\n", "if rank == 0:\n    s = model.state_dict()\nelse:\n    model.state_dict()\n"
    )
    assert codes(findings, Status.NEEDS_DECISION) == []


def test_function_that_takes_a_state_dict_gathers_it_where_all_ranks_may_call_it():
    save = (
        "def save(model):\n    torch.save(model.state_dict(), path)\n\n\nif rank == 0:\n    save(model)\nsave(model)\n"
    )
    text, findings = migrate("model = FSDP(build())\n", save)
    assert "torch.save(_whole_state(model), path)" in text
    assert codes(findings, Status.NEEDS_DECISION) == []


@pytest.mark.parametrize("test", ["rank == 0 or is_last", "is_last", "step % 2 == 0"])
def test_state_dict_that_all_ranks_may_come_to_is_gathered(test: str):
    _, findings = migrate("model = FSDP(build())\n", f"if {test}:\n    state = model.state_dict()\n")
    assert codes(findings, Status.NEEDS_DECISION) == []


KIND = "from torch.distributed.fsdp import StateDictType\n\n\n@contextlib.contextmanager\ndef kind(model):\n"
KIND += "    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):\n        yield\n\n\n"


@pytest.mark.parametrize(
    "entered", ["kind(model)", "fsdp_state_dict_type_context(model, 'sharded')"], ids=["own", "foreign"]
)
def test_state_dict_under_the_context_of_a_helper_is_not_taken_for_a_full_one(entered: str):
    text, findings = migrate(KIND, f"model = FSDP(build())\nwith {entered}:\n    out = model.state_dict()\n")
    assert "out = model.state_dict()" in text
    (finding,) = [one for one in findings if one.code == "SW111"]
    assert finding.status is Status.NEEDS_DECISION


COLLECTED = "def run(model):\n    params = [p for p in model.parameters() if p.requires_grad]\n"
OPTIMIZERS = {
    "of_a_list": COLLECTED + "    optimizer = torch.optim.AdamW(params)\n    model = FSDP(model)\n    return model\n",
    "of_a_list_built_after": COLLECTED + "    model = FSDP(model)\n    return torch.optim.AdamW(params)\n",
    "of_groups": "def run(model):\n    groups = [{'params': [p for n, p in model.named_parameters() if 'bias' in n]}]\n"
    "    optimizer = torch.optim.AdamW(groups)\n    model = FSDP(model)\n    return model, optimizer\n",
    "of_a_part": "def run(model):\n    optimizer = torch.optim.AdamW(p for _, p in model.head.named_parameters())\n"
    "    model = FSDP(model)\n    return model, optimizer\n",
    "of_a_helper": "def groups(net):\n    return [{'params': list(net.parameters())}]\n\n\ndef run(model):\n"
    "    optimizer = torch.optim.AdamW(groups(model))\n    model = FSDP(model)\n    return model, optimizer\n",
    "of_a_method": "def run(model):\n    opt = model.configure_optimizers(0.1)\n    model = FSDP(model)\n"
    "    return model, opt\n",
    "of_a_file": "from other import groups\n\n\ndef run(model):\n    optimizer = torch.optim.AdamW(groups(model))\n"
    "    model = FSDP(model)\n    return model, optimizer\n",
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_of_parameters_taken_before_is_moved_or_pointed_at_the_new_ones(name: str):
    other = "def groups(net):\n    return [p for p in net.parameters()]\n"
    text, findings = migrate(OPTIMIZERS[name], other=other)
    if "SW128" in codes(findings, Status.REPORTED):
        assert "model = _shard_units(model, use_orig_params=True)" in text
    else:
        assert "SW128" in codes(findings, Status.REWRITTEN)
        built = "torch.optim.AdamW(" if "AdamW(" in text else "model.configure_optimizers("
        assert text.rindex("model = fully_shard(model)") < text.rindex(built)
        taken = [line for line in text.splitlines() if "model.parameters()" in line or "named_parameters()" in line]
        assert all(text.rindex("model = fully_shard(model)") < text.index(line) for line in taken)


TRAINER = "class Trainer:\n    def __init__(self, model):\n        self.model = model\n        self.teacher = build()\n"
BUILDS = "\n    def build(self):\n        self.optimizer = torch.optim.AdamW(self.model.parameters())\n"
SHARDS = "\n    def shard(self):\n        self.model = FSDP(self.model)\n"
METHODS = {
    "first": TRAINER + "        self.build()\n        self.shard()\n" + BUILDS + SHARDS,
    "in_the_constructor": TRAINER + BUILDS.split("\n", 2)[2] + SHARDS,
    "in_no_known_order": TRAINER + BUILDS + SHARDS,
    "in_another_file": TRAINER
    + SHARDS
    + "\n\ndef main(model):\n    trainer = Trainer(model)\n    build(trainer)\n    trainer.shard()\n",
    "parameters_kept_first": TRAINER
    + "        self.params = list(model.parameters())\n        self.shard()\n"
    + "        self.optimizer = torch.optim.AdamW(self.params)\n"
    + SHARDS,
}
IN_ORDER = {
    "after": TRAINER + "        self.shard()\n        self.build()\n" + BUILDS + SHARDS,
    "shards_in_the_constructor": TRAINER + SHARDS.split("\n", 2)[2] + BUILDS,
    "other_model": TRAINER + BUILDS.replace("self.model", "self.teacher") + SHARDS,
}
OTHER = "import torch\nimport main\n\n\ndef build(trainer):\n    return torch.optim.AdamW(trainer.model.parameters())\n"


@pytest.mark.parametrize("name", [*METHODS, *IN_ORDER])
def test_optimizer_that_another_method_builds_is_pointed_at_the_new_parameters(name: str):
    text, _ = migrate("from other import build\n\n\n", {**METHODS, **IN_ORDER}[name], other=OTHER)
    assert ("_shard_units(self.model, use_orig_params=True)" in text) is (name in METHODS)


MARKS = {
    "loop": "for p in model.parameters():\n    p.decays = True\n",
    "named": "for name, p in model.named_parameters():\n    setattr(p, 'group', name)\n",
    "made": "scale = torch.nn.Parameter(torch.ones(1))\nscale.decays = False\n",
    "layer": "model.head.weight.is_embedding = True\n",
}


@pytest.mark.parametrize("name", MARKS)
def test_attributes_of_parameters_are_carried_over(name: str):
    text, _ = migrate(MARKS[name], "model = FSDP(model)\n")
    assert "model = _shard_units(model, use_orig_params=True)" in text


@pytest.mark.parametrize("line", ["p.requires_grad = False", "p.data = p.data * 2", "model.head.weight = other"])
def test_a_parameters_own_attributes_need_no_carrying(line: str):
    text, _ = migrate(f"for p in model.parameters():\n    {line}\n", "model = FSDP(model)\n")
    assert "model = fully_shard(model)" in text


@pytest.mark.parametrize(
    "body",
    [
        "def run(model):\n    size = sum(p.numel() for p in model.parameters())\n    model = FSDP(model)\n"
        "    return torch.optim.AdamW(model.parameters()), size\n",
        "def run(model, teacher):\n    optimizer = torch.optim.AdamW(teacher.parameters())\n    model = FSDP(model)\n"
        "    return model, optimizer\n",
        "def run(model):\n    if sharded:\n        model = FSDP(model)\n        return make(model)\n"
        "    return torch.optim.AdamW(model.parameters())\n",
    ],
    ids=["counted", "other_model", "other_branch"],
)
def test_optimizer_in_its_place_is_no_hindrance(body: str):
    _, findings = migrate(body)
    assert codes(findings, Status.REWRITTEN) == ["SW101"]


INTERNALS = {
    "group": "def norm(model):\n    return dist.all_reduce(x, group=model.process_group)\n\n\nnorm(wrap())\n",
    "unit": "def look(model):\n    for unit in model.modules():\n        print(unit.head._handle)\n\n\nlook(wrap())\n",
    "parameter": "def look(p):\n    return p._mp_param\n",
}


@pytest.mark.parametrize("name", INTERNALS)
def test_internals_of_a_model_that_came_by_are_reported(name: str):
    _, findings = migrate(WRAP, INTERNALS[name])
    assert "SW127" in codes(findings, Status.NEEDS_DECISION)


def test_parameters_of_a_model_that_came_by_are_counted_once():
    body = "def size(model):\n    return world_size * sum(p.numel() for p in model.parameters())\n\n\nsize(wrap())\n"
    _, findings = migrate(WRAP, body)
    assert "SW135" in codes(findings, Status.REPORTED)


@pytest.mark.parametrize("call", ["state_dict()", "load_state_dict(s)"])
def test_state_of_the_inner_module_is_that_of_the_model(call: str):
    text, _ = migrate(
        f"def run(model):\n    model = FSDP(model)\n    if known():\n        return model.module.{call}\n"
    )
    assert "model.module." not in text
    assert "(model.module" not in text


@pytest.mark.parametrize("attribute", ["process_group", "mixed_precision", "rank"])
def test_settings_of_a_wrapped_model_are_no_part_of_it(attribute: str):
    kept = "def keep(layer):\n    return layer.state_dict()\n\n\n"
    text, findings = migrate(kept, f"def run():\n    model = FSDP(build())\n    keep(model.{attribute})\n")
    assert "return layer.state_dict()" in text
    assert "SW111" not in codes(findings)


def test_variable_of_which_nothing_is_known_is_not_the_function_around_it():
    called = "def call(function, model):\n    function(model)\n\n\n"
    text, findings = migrate(
        called, "def run(options):\n    limit = 3\n    call(limit, FSDP(build()))\n    return options.state_dict()\n"
    )
    assert "return options.state_dict()" in text
    assert "SW111" not in codes(findings)


def test_an_attribute_that_is_assigned_is_no_model():
    text, _ = migrate("def run(fake, real):\n    model = FSDP(real)\n    fake._fsdp_wrapped_module = real\n")
    assert "fake._fsdp_wrapped_module = real" in text


def test_choices_by_the_dimensions_of_sharded_parameters_are_reported():
    _, findings = migrate(
        "def groups(model):\n    model = FSDP(model, use_orig_params=True)\n"
        "    return [p for p in model.parameters() if p.ndim > 1]\n"
    )
    assert "SW135" in codes(findings, Status.REPORTED)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    optimizer = torch.optim.SGD(model.parameters())\n", False),
        ("    for _ in range(9):\n        optimizer = torch.optim.SGD(model.parameters())\n", True),
        ("    with torch.no_grad():\n        model(x)\n    optimizer = torch.optim.SGD(model.parameters())\n", True),
        ("    warm_up(model)\n    optimizer = build_optimizer(model)\n", True),
        ("    log_size(model)\n    optimizer = build_optimizer(model)\n", False),
        ("    for x in batches:\n        loss = model(x)\n        model.zero_grad()\n        loss.backward()\n", True),
        ("    for x in batches:\n        model.zero_grad()\n        loss = model(x)\n        loss.backward()\n", False),
        ("    for x in batches:\n        loss = model(x)\n        loss.backward()\n        model.zero_grad()\n", False),
        (
            "    model(x).backward()\n    with torch.no_grad():\n        model(x)\n    model.clip_grad_norm_(1.0)\n",
            True,
        ),
        (
            "    with torch.no_grad():\n        model(x)\n    model(x).backward()\n    model.clip_grad_norm_(1.0)\n",
            False,
        ),
    ],
    ids=[
        "optimizer",
        "rebuilt",
        "evaluated",
        "handed_on",
        "logged",
        "cleared_between",
        "cleared_before",
        "cleared_after",
        "clipped_after_evaluation",
        "clipped_after_backward",
    ],
)
def test_what_a_forward_left_unsharded_is_resharded_where_the_shards_are_meant(body: str, expected: bool):
    text, findings = migrate(f"def run(model):\n    model = FSDP(model)\n{body}")
    assert ("    _reshard(model)\n" in text) is expected
    assert ("SW138" in codes(findings, Status.REWRITTEN)) is expected


def test_gradients_of_backward_in_another_method_are_clipped_after_resharding():
    text, findings = migrate(
        "class Trainer:\n    def __init__(self, model):\n        self.model = FSDP(model)\n\n"
        "    def one_step(self, is_generator):\n        self.model(1).backward()\n\n    def train(self):\n"
        "        self.one_step(True)\n        self.one_step(False)\n        self.model.clip_grad_norm_(1.0)\n"
    )
    assert "        _reshard(self.model)\n        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)" in text
    assert ["updated root" in one.message for one in findings if one.code == "SW138"] == [True]


@pytest.mark.parametrize("folder", ["", "./"])
def test_relative_imports_are_followed_from_the_current_folder_too(folder: str):
    wrap = IMPORTS + "def wrap(model):\n    return FSDP(model)\n"
    use = "from .wrapping import wrap\n\n\ndef run(model):\n    return wrap(model).state_dict()\n"
    program = Program({f"{folder}core/wrapping.py": wrap, f"{folder}core/use.py": use})
    text, _ = rewrite(program.file(f"{folder}core/use.py"), program, "torch")
    assert "wrap(model).state_dict()" not in text


STRATEGIES = "class Strategy:\n    def __init__(self, model):\n        self.model = model\n\n\n"
STRATEGIES += "class Sharded(Strategy):\n    def setup(self):\n        self.model = FSDP(self.model)\n\n\n"
STRATEGIES += (
    "class Replicated({base}):\n    def setup(self):\n        self.o = torch.optim.SGD(self.model.parameters())\n"
)


@pytest.mark.parametrize(("base", "is_reported"), [("Strategy", False), ("Sharded", True)])
def test_an_optimizer_of_a_sibling_class_is_of_another_object(base: str, is_reported: bool):
    _, findings = migrate(STRATEGIES.replace("{base}", base))
    told = [one.message for one in findings if one.code == "SW128"]
    assert bool(told) is is_reported
    assert all(one.startswith("the optimizer of line 18 is pointed") for one in told)


def test_an_optimizer_of_another_file_is_named_with_it():
    main = "from building import build\n\n\ndef run(model):\n    opt = build(model)\n"
    main += "    if sharded:\n        model = FSDP(model)\n"
    building = "import torch\n\n\ndef build(model):\n    return torch.optim.SGD(model.parameters())\n"
    _, findings = migrate(main, building=building)
    assert [one.message[:33] for one in findings if one.code == "SW128"] == ["the optimizer of building.py:5 is"]


GPT = """
import torch.nn as nn


class GPT(nn.Module):
    def groups(self):
        named = dict(self.named_parameters())
        return [p for p in named.values() if p.dim() >= 2]

    def size(self):
        return 6 * self.count()

    def count(self):
        return sum(p.numel() for p in self.parameters())

    def loss(self, x):
        return self.forward(x).sum()

    def device(self, x):
        return next(self.parameters()).device if x.dim() else None

    def generate(self, x):
        return self(x)
"""
OWN_METHODS = {"groups": ["SW135"], "size": ["SW135"], "loss": ["SW136"], "device": [], "generate": []}


@pytest.mark.parametrize("method", OWN_METHODS)
def test_methods_of_the_models_own_class_are_read_in_its_file(method: str):
    before, after = (
        f"model = GPT()\nmodel.{method}(x)\nmodel = wrap(model)\n",
        f"model = wrap(GPT())\nmodel.{method}(x)\n",
    )
    start = "from gpt import GPT\n\n\ndef wrap(model):\n    return FSDP(model)\n\n\n"
    assert codes(migrate(start, before, gpt=GPT)[1]) == ["SW101"]
    assert codes(migrate(start, after, gpt=GPT)[1]) == ["SW101", *OWN_METHODS[method]]


def test_a_model_moved_to_a_device_is_no_part_of_itself():
    body = "if gpu:\n    model = FSDP(net.to(d), mixed_precision=MixedPrecision(param_dtype=torch.half))\nelse:\n"
    text, _ = migrate("from torch.distributed.fsdp import MixedPrecision\n\n", body, "    model = FSDP(net)\n")
    assert "fully_shard(net.to(d), mp_policy=" in text
    assert "cast_forward_inputs" not in text


def test_a_file_named_after_fsdp2_that_wraps_by_fsdp1_is_rewritten_whole():
    body = "from torch.distributed.fsdp import StateDictType\n\nmodel = FSDP(build())\n"
    body += "with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):\n    save(model.state_dict())\n"
    program = Program({"train_fsdp2.py": IMPORTS + body})
    text, findings = rewrite(program.file("train_fsdp2.py"), program, "torch")
    assert "state_dict_type" not in text
    assert codes(findings, Status.NEEDS_DECISION) == []


def test_a_class_inside_of_a_class_keeps_what_it_is_given():
    body = """class Core:
    class Models:
        net: object

    def setup(self):
        return self.Models(net=FSDP(build()))

    def run(self):
        models = self.setup()
        self.step(models)

    def step(self, models):
        torch.nn.utils.clip_grad_norm_(models.net.parameters(), 1.0)
"""
    assert codes(migrate(body)[1]) == ["SW101", "SW120"]


def test_a_method_of_fsdp1_called_on_the_model_is_reported():
    _, findings = migrate("model = FSDP(build())\nmodel.set_state_dict_type(kind, config)\n")
    assert codes(findings, Status.NEEDS_DECISION) == ["SW131"]


def test_arguments_left_out_side_by_side_at_the_end_of_a_line_do_not_collide():
    text, findings = migrate(
        "model = FSDP(net, cpu_offload=None, mixed_precision=None,\n             auto_wrap_policy=policy)\n"
    )
    assert codes(findings) == ["SW101"]
    assert "mixed_precision" not in text


@pytest.mark.parametrize(
    "body",
    [
        "for p in model.parameters():\n    p.data = p.data.float()\n",
        "from casting import upcast\n\nupcast(model.parameters(), torch.float32)\n",
    ],
)
def test_other_data_for_sharded_parameters_is_reported(body: str):
    casting = "def upcast(params, dtype):\n    for p in params:\n        p.data = p.master\n"
    assert "SW135" in codes(migrate("model = FSDP(build())\n", body, casting=casting)[1], Status.NEEDS_DECISION)
    assert "SW135" not in codes(migrate(body.replace("model", "plain"), "FSDP(build())\n", casting=casting)[1])


SAVER = "class Saver:\n    def save(self, model):\n        torch.save(model.state_dict(), 'x')\n"
SAVERS = {
    "kept": "saver = Saver()\n\n\ndef run():\n    saver.save(FSDP(build()))\n",
    "attribute": "class Loop:\n    def __init__(self):\n        self.saver = Saver()\n\n    def run(self):\n"
    "        self.saver.save(FSDP(build()))\n",
    "at_once": "Saver().save(FSDP(build()))\n",
    "by_its_class": "Saver.save(None, FSDP(build()))\n",
    "made_by_a_function": "saver = make_saver()\nsaver.save(FSDP(build()))\n",
}


@pytest.mark.parametrize("name", SAVERS)
def test_object_of_a_file_without_fsdp_is_followed_when_a_method_gets_the_model(name: str):
    saver = f"import torch\n\n\n{SAVER}\n\ndef make_saver():\n    return Saver()\n"
    main = f"{IMPORTS}from saver import Saver, make_saver\n\n{SAVERS[name]}"
    program = Program({"saver.py": saver, "main.py": main})
    text, _ = rewrite(program.file("saver.py"), program, "torch")
    assert "torch.save(_whole_state(model), 'x')" in text


def test_object_of_a_file_without_fsdp_that_gets_no_model_is_left_unread():
    program = Program({"saver.py": f"import torch\n\n\n{SAVER}", "main.py": f"{IMPORTS}from saver import Saver\n\n"
                       "Saver().save(build())\nmodel = FSDP(build())\n"})  # fmt: skip
    assert rewrite(program.file("saver.py"), program, "torch") == (program.texts["saver.py"], [])


USERS = {
    "nobody": ("", True),
    "tests": ("", True),
    "handed_on": ("def make():\n    return wrap(build())\n", True),
    "caller": ("def train():\n    model = wrap(build())\n    model(batch)\n", False),
    "at_once": ("model = wrap(build())\n", False),
    "method": ("class Loop:\n    def __init__(self):\n        self.model = wrap(build())\n", False),
}


@pytest.mark.parametrize("name", USERS)
def test_model_that_only_code_not_given_uses_is_reported(name: str):
    use, expected = USERS[name]
    tests = {"tests/check": f"{IMPORTS}from main import wrap\n\nwrap(build())\n"} if name == "tests" else {}
    _, findings = migrate(f"def wrap(model):\n    return FSDP(model)\n\n\n{use}", **tests)
    assert codes(findings, Status.REPORTED) == ["SW132"] * expected


OWNERS = {
    "field": "class Loop:\n    dist: Dist = field(default_factory=Dist)\n\n    def run(self):\n"
    "        model = self.dist.shard(build())\n        torch.save(model.state_dict(), 'x')\n",
    "parameter": "def run(dist):\n    model = dist.shard(build())\n    torch.save(model.state_dict(), 'x')\n",
}


@pytest.mark.parametrize("name", OWNERS)
def test_method_that_wraps_is_followed_on_an_object_of_unknown_class(name: str):
    dist = f"{IMPORTS}class Dist:\n    def shard(self, model):\n        return FSDP(model)\n"
    program = Program({"main.py": f"import torch\nfrom dist import Dist\n\n\n{OWNERS[name]}", "dist.py": dist})
    text, findings = rewrite(program.file("main.py"), program, "torch")
    assert "torch.save(_whole_state(model), 'x')" in text or "get_model_state_dict(model" in text
    assert codes(findings) == ["SW111"]


UNIT_BY_NAME = """import torch.nn as nn


class Attention(nn.Module):
    pass


class Block(nn.Module):
    def __init__(self):
        self.attention = Attention()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return x + self.attention.forward(self.norm.forward(x))
"""


def test_a_unit_that_a_file_without_fsdp_runs_by_its_forward_is_called_itself(tmp_path: Path):
    (tmp_path / "model.py").write_text(UNIT_BY_NAME)
    imports = "from model import Attention\nfrom torch.distributed.fsdp.wrap import ModuleWrapPolicy\n\n"
    wrap = "policy = ModuleWrapPolicy({Attention})\nmodel = FSDP(b, auto_wrap_policy=policy)\n"
    (tmp_path / "main.py").write_text(IMPORTS + imports + wrap)
    files = {Path(one.path).name: one for one in migrate_files([tmp_path]).files}
    assert files["model.py"].output == UNIT_BY_NAME.replace("attention.forward(", "attention(")
    (tmp_path / "main.py").write_text(IMPORTS + "model = FSDP(b)\n")
    assert "model.py" not in {Path(one.path).name for one in migrate_files([tmp_path]).files}


RUN_ELSEWHERE = "def show(model, batch):\n    return model.forward(batch)\n"
"""The model is wrapped by some callers, and nothing shows what others hand over."""


@pytest.mark.parametrize("given", ["model", "FSDP(model) if sharded else model"])
def test_forward_of_a_model_that_is_sharded_on_some_runs_is_called_itself(given: str):
    body = f"{RUN_ELSEWHERE}\n\ndef main(model, batch, sharded):\n    model = {given}\n    show(model, batch)\n"
    text, findings = migrate(body)
    assert ("return model(batch)" in text) == ("FSDP(" in given)
    assert ("SW136" in codes(findings, Status.REWRITTEN)) == ("FSDP(" in given)


def test_forward_of_an_object_that_is_no_module_is_left_alone():
    policy = "class Policy:\n    def forward(self, batch):\n        return batch\n\n\n"
    body = "def main(model, batch, sharded):\n    one = FSDP(model) if sharded else Policy()\n    one.forward(batch)\n"
    assert "one.forward(batch)" in migrate(policy + body)[0]


STARTS = "import torch.distributed as dist\n\n\ndef start():\n    dist.init_process_group('nccl')\n"
OFFLOADED = IMPORTS + (
    "from torch.distributed.fsdp import CPUOffload\n\n\ndef wrap(model, offload):\n"
    "    return FSDP(model, cpu_offload=CPUOffload(offload_params=offload))\n"
)
STARTED_ELSEWHERE = {
    "by_a_file_that_it_imports": (f"from start import start\n{OFFLOADED}", "", True),
    "by_the_script_that_imports_both": (OFFLOADED, "from start import start\nfrom wrap import wrap\n", True),
    "by_a_file_that_has_nothing_to_do_with_it": (OFFLOADED, "from wrap import wrap\n", False),
    "and_by_itself": (f"from start import start\n{OFFLOADED}\n\n{STARTS.replace('start', 'begin')}", "", False),
    "but_nothing_is_offloaded": (f"from start import start\n{OFFLOADED.replace('=offload)', '=False)')}", "", False),
}


@pytest.mark.parametrize("name", STARTED_ELSEWHERE)
def test_gloo_joins_where_the_ranks_of_an_offloaded_model_are_started(tmp_path: Path, name: str):
    wrap, main, is_told = STARTED_ELSEWHERE[name]
    for stem, text in {"start": STARTS, "wrap": wrap, "main": main}.items():
        (tmp_path / f"{stem}.py").write_text(text)
    files = {Path(one.path).name: one for one in migrate_files([tmp_path]).files}
    assert ("start.py" in files) == is_told
    assert not is_told or files["start.py"].output == STARTS.replace("'nccl'", '"cpu:gloo,cuda:nccl"')


OWN_NAME = """
dist.init_process_group("nccl")
model = FSDP(make(), cpu_offload=CPUOffload(offload_params=True))
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
    state = model.state_dict()


def get_model_state_dict(model):
    return model.state_dict()


get_model_state_dict(plain)
"""


def test_function_with_the_name_of_one_that_emitted_code_calls_keeps_it():
    head = "from torch.distributed.fsdp import CPUOffload, StateDictType\nimport torch.distributed as dist\n"
    text, findings = migrate(head + OWN_NAME)
    assert "    get_model_state_dict as fsdp2_get_model_state_dict,\n" in text
    assert "\nstate = fsdp2_get_model_state_dict(model, options=" in text
    assert "\nget_model_state_dict(plain)\n" in text
    assert "cpu:gloo,cuda:nccl" in text
    assert codes(findings, Status.NEEDS_DECISION) == []


SETS = "import torch\nimport torch.distributed as dist\n\n\ndef start(rank):\n    torch.cuda.set_device(rank)\n"
MOVED = IMPORTS + "import torch.distributed as dist\n\n\ndef build(model, rank):\n    dist.init_process_group('nccl')\n"
MOVED += "    return FSDP(model.to(rank))\n"
SETTING_ELSEWHERE = {
    "in_a_file_that_it_imports": (f"from setting import start\n{MOVED}", "", False),
    "in_one_that_the_script_imports": (
        MOVED,
        "import setting\nimport wrap\n\nif __name__ == '__main__':\n    1\n",
        False,
    ),
    "in_the_script": (MOVED, f"from wrap import build\n{SETS}", False),
    "in_another_program": (MOVED, "from wrap import build\n", True),
}


@pytest.mark.parametrize("name", SETTING_ELSEWHERE)
def test_device_that_only_another_program_sets_is_not_set(tmp_path: Path, name: str):
    wrap, main, is_told = SETTING_ELSEWHERE[name]
    for stem, text in {"setting": SETS, "wrap": wrap, "main": main}.items():
        (tmp_path / f"{stem}.py").write_text(text)
    told = [one.message for file in migrate_files([tmp_path]).files for one in file.findings if one.code == "SW101"]
    assert ["current device" in message for message in told] == [is_told]


BUILT = """
class Base:
    def build_model(self) -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict({"net": torch.nn.Linear(4, 4)})


def decorate(base):
    class Sharded(base):
        def set_up(self):
            model = self.build_model().cuda().to(torch.float16)
            model.forward = super().training_step
            self.model = FSDP(model.to(torch.float16), sync_module_states=True)

    return Sharded
"""


@pytest.mark.parametrize("given", ["ModuleDict", "Module"])
def test_container_that_a_method_of_a_class_given_at_run_time_makes_is_refused(given: str):
    body = BUILT if given == "ModuleDict" else BUILT.replace("torch.nn.ModuleDict:", "torch.nn.Module:")
    body = body if given == "ModuleDict" else body.replace("torch.nn.ModuleDict(", "Net(")
    text, findings = migrate(body)
    assert ("self.model = FSDP(" in text) == (given == "ModuleDict")
    told = [one.message for one in findings if one.status is Status.NEEDS_DECISION]
    assert any("ModuleDict has no forward" in one for one in told) == (given == "ModuleDict")


@pytest.mark.parametrize("given", ["", ", ignored_states=[model.token]"])
def test_norm_of_ignored_parameters_is_said_to_be_of_one_rank(given: str):
    _, findings = migrate(f"model = FSDP(model{given})\nmodel.clip_grad_norm_(1.0)\n")
    told = [one.message for one in findings if one.code == "SW120"]
    assert ["ignored parameters" in one for one in told] == [bool(given)]


SWITCHED = """
model, critic = FSDP(model), FSDP(critic)
model.requires_grad_(True)
for batch in batches:
    critic.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("head" in name)
    for name, parameter in model.named_parameters():
        print(name, parameter.requires_grad)
    critic(model(batch)).backward()
"""


def test_models_are_resharded_before_their_parameters_are_switched():
    text, findings = migrate(SWITCHED)
    assert "    _reshard(critic)\n    critic.requires_grad_(False)\n    _reshard(model)\n    for name," in text
    assert text.count("_reshard(model)\n") == 1
    assert codes(findings, Status.REWRITTEN).count("SW138") == 2


@pytest.mark.parametrize(("name", "is_resharded"), [("train_one_step", True), ("set_up", False)])
def test_models_are_resharded_before_a_function_switches_their_parameters(name: str, is_resharded: bool):
    body = (
        f"def {name}(model, flag):\n    for parameter in model.parameters():\n        parameter.requires_grad = flag\n"
    )
    text, _ = migrate(f"{body}\n\nmodel = FSDP(model)\n{name}(model, True)\n")
    assert (f"def {name}(model, flag):\n    _reshard(model)\n    for" in text) == is_resharded
