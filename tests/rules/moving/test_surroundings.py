"""What stands around a constructor decides too: what must stay with it, what moves with it, what is said about it."""

from __future__ import annotations

import pytest

from shardwise.findings import SourceFinding, Status
from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import rewrite
from tests.rules.moving.test_rewriting import AC, IMPORTS, moved, status_of

STAYS, GOES, TOLD = [Status.NEEDS_DECISION], [Status.REWRITTEN], [Status.REPORTED]


def together(texts: dict[str, str], target: str = "torch") -> dict[str, tuple[str, list[SourceFinding]]]:
    program = Program(texts)
    return {path: rewrite(program.file(path), program, target) for path in texts}


HANDED_ON = "def wrap(module, mp):\n    return FSDP(module, mixed_precision=mp)\n\n\n"


@pytest.mark.parametrize(
    "use",
    [
        "model = each_part(model, wrap)\n",
        "model.head = wrap(model.head, mp)\nmodel = wrap(model, mp)\n",
        "for name, block in model.named_children():\n    setattr(model, name, wrap(block, mp))\n",
    ],
    ids=["handed_on", "nested", "loop"],
)
def test_function_for_parts_of_a_model_leaves_it_to_the_run_which_of_them_casts_its_inputs(use: str):
    text, findings = moved(HANDED_ON + use)
    assert "_shard_units(module, **_precision(mp), is_part=True)" in text
    assert status_of(findings) == GOES


@pytest.mark.parametrize(
    "body",
    [
        HANDED_ON + "student, teacher = wrap(student, mp), wrap(teacher, mp)\n",
        HANDED_ON.replace("=mp)", "=MixedPrecision(torch.float16, cast_forward_inputs=True))")
        + "model = each_part(model, wrap)\n",
        HANDED_ON.replace(", mixed_precision=mp", "") + "model = each_part(model, wrap)\n",
        "def main(rank, mp):\n    model = FSDP(build(), mixed_precision=mp)\n\n\ntorch.multiprocessing.spawn(main)\n",
    ],
    ids=["two_models", "all_cast", "no_precision", "started_elsewhere"],
)
def test_function_for_whole_models_is_rewritten(body: str):
    text, findings = moved(body)
    assert status_of(findings) == GOES
    assert "is_part" not in text


def test_parts_become_units_of_fully_shard_for_shardwise_too():
    body = HANDED_ON.replace(", mixed_precision=mp", "") + "model = each_part(model, wrap)\n"
    text, _ = moved(body, "shardwise")
    assert "return fully_shard(module)" in text


@pytest.mark.parametrize(
    "use",
    [
        "for one in units(model):\n    one._flat_param.data = 0\n",
        "from torch.distributed.fsdp._runtime_utils import _lazy_init\n_lazy_init(model, model)\n",
        "import torch.distributed.fsdp._common_utils as fsdp\nfsdp._get_module_fsdp_state(model).grow()\n",
    ],
    ids=["flat", "private", "private_module"],
)
def test_every_line_that_works_on_internals_of_the_model_is_reported(use: str):
    text, findings = moved(f"model = FSDP(model)\n{use}")
    assert status_of(findings) == GOES
    last = text.count("\n", 0, text.index(use.splitlines()[-1])) + 1
    assert last - text.count("\n") + (IMPORTS + "model = FSDP(model)\n" + use).count("\n") in {
        one.line for one in findings if one.code == "SW127" and one.status is Status.NEEDS_DECISION
    }


@pytest.mark.parametrize("told", ["use_orig_params=True", "use_orig_params=False"])
def test_function_that_is_given_the_optimizer_too_points_it_at_the_new_parameters_as_fsdp1_did(told: str):
    text, findings = moved(
        f"def prepare(model, optimizer):\n    model = FSDP(model, {told})\n    return model, optimizer\n"
    )
    assert status_of(findings) == GOES
    assert ("_shard_units(model, use_orig_params=True)" in text) is ("True" in told)
    assert status_of(findings, "SW128") == (TOLD if "True" in told else [])


def test_optimizer_handed_in_and_built_anew_is_no_hindrance():
    body = "def run(model, optimizer):\n    model = FSDP(model, use_orig_params=True)\n    optimizer = make(model)\n"
    _, findings = moved(body)
    assert status_of(findings) == GOES


BOTH = {
    "by_name": "def clip(model):\n    if not is_fsdp2(model):\n        return model.clip_grad_norm_(1.0)\n",
    "by_type": "from torch.distributed.fsdp import FSDPModule\n\n\ndef clip(model):\n    if isinstance(model, FSDP):\n"
    "        return model.clip_grad_norm_(1.0)\n    if isinstance(model, FSDPModule):\n        return None\n",
}


@pytest.mark.parametrize("kind", BOTH)
def test_code_that_tells_the_two_apart_stays(kind: str):
    build = "def build(model):\n    return FSDP(model)\n"
    texts = {"build.py": IMPORTS + build, "clip.py": IMPORTS + BOTH[kind]}
    found = together(texts)
    assert status_of(found["build.py"][1]) == GOES
    assert found["clip.py"][0] == texts["clip.py"]
    assert {finding.status for finding in found["clip.py"][1]} == {Status.NEEDS_DECISION}


def test_check_for_either_class_is_right_as_it_is():
    body = "model = FSDP(model)\nis_sharded = isinstance(model, (FSDP, FSDPModule))\n"
    text, findings = moved(f"from torch.distributed.fsdp import FSDPModule\n\n{body}")
    assert "isinstance(model, (FSDP, FSDPModule))" in text
    assert not status_of(findings, "SW123")


def test_folder_for_fsdp2_is_left_alone():
    own = IMPORTS + "def clip(model: FSDP):\n    return model.clip_grad_norm_(1.0)\n"
    found = together({"engine/fsdp2/clip.py": own, "engine/build.py": IMPORTS + "model = FSDP(model)\n"})
    assert found["engine/fsdp2/clip.py"][0] == own


@pytest.mark.parametrize(
    ("call", "expected"), [("FSDP(model)", GOES), ("FSDP(model, device_ids=[0])", STAYS)], ids=["goes", "stays"]
)
def test_other_files_stay_if_every_constructor_does(call: str, expected: list[Status]):
    use = "def clip(model):\n    if isinstance(model, FSDP):\n        model.clip_grad_norm_(1.0)\n"
    scaler = "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n\n"
    check = f"{IMPORTS}{scaler}\n{use}    return isinstance(model.scaler, ShardedGradScaler)\n"
    found = together({"build.py": f"{IMPORTS}model = {call}\n", "use.py": check})
    text, findings = found["use.py"]
    assert (text == check) is (expected == STAYS)
    for code in ("SW120", "SW122", "SW123"):
        assert status_of(findings, code) == expected, code


COPY = """\
import torch


class FullyShardedDataParallel(torch.nn.Module):
    @property
    def module(self):
        return self._fsdp_wrapped_module
"""


def test_copy_of_fsdp1_is_left_alone():
    text, findings = moved("", imports=COPY)
    assert text == COPY
    assert [finding.code for finding in findings] == ["SW102"]


def test_internals_reached_in_a_loop_over_units_are_reported():
    body = (
        "model = FSDP(model)\nfor unit in FSDP.fsdp_modules(model):\n    if unit._has_params:\n"
        "        torch.distributed.fsdp._runtime_utils._reshard(unit, unit._handle, True)\n"
    )
    text, findings = moved(body)
    assert {finding.line - IMPORTS.count("\n") for finding in findings if finding.code == "SW127"} == {3, 4}
    assert "for unit in FSDP.fsdp_modules(model):" in text
    assert status_of(findings, "SW123") == STAYS


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (None, STAYS),
        ("from torch.distributed.fsdp._common_utils import _get_module_fsdp_state\n\n\n"
         "def prepare_for_fsdp(model):\n    return _get_module_fsdp_state(model)\n", STAYS),
        ("def prepare_for_fsdp(model):\n    return model\n", []),
    ],
    ids=["not_given", "private", "plain"],
)  # fmt: skip
def test_function_made_for_fsdp1_is_reported(library: str | None, expected: list[Status]):
    main = f"{IMPORTS}from library import prepare_for_fsdp\n\nmodel = FSDP(model)\nprepare_for_fsdp(model)\n"
    found = together({"main.py": main, **({"library.py": library} if library else {})})
    assert status_of(found["main.py"][1], "SW132") == expected
    assert status_of(found["main.py"][1]) == GOES


OTHER_MODULE = f"""{AC}

def recompute(args, model=None):
    apply_activation_checkpointing(model, check_fn=args.blocks)
"""


@pytest.mark.parametrize("call", ["recompute(args, model=model)", "recompute(args, model)"])
def test_recomputation_is_seen_wherever_the_model_is_among_the_arguments(call: str):
    main = f"{IMPORTS}from other import recompute\n\nmodel = FSDP(model)\nif args.recomputed:\n    {call}\n"
    text, findings = together({"main.py": main, "other.py": OTHER_MODULE})["main.py"]
    assert status_of(findings, "SW125") == GOES
    assert text.index(call) < text.index("fully_shard(model)")


def test_function_that_seems_to_recompute_in_a_way_not_known_is_reported():
    function = "def apply_checkpointing(model):\n    own.wrap(model, checkpoint_wrapper)\n\n\n"
    _, findings = moved(f"{function}model = FSDP(model)\napply_checkpointing(model)\n")
    assert status_of(findings, "SW125") == STAYS


BASE = """\
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def base(self):
        if isinstance(self.model, (DDP, FSDP)):
            return self.model.module
        return self.model
"""


def test_inner_module_behind_a_check_for_fsdp1_is_not_asked_of_fsdp2():
    text, _ = moved(BASE)
    assert "isinstance(self.model, (DDP, FSDPModule))" in text
    assert 'return (self.model.module if hasattr(self.model, "module") else self.model)' in text


def test_state_of_an_optimizer_that_is_not_torchs_stays():
    body = "model = FSDP(model)\nstate = FSDP.full_optim_state_dict(model, optimizer)\ninner = optimizer.unwrap()\n"
    text, findings = moved(body)
    assert "FSDP.full_optim_state_dict(model, optimizer)" in text
    assert status_of(findings, "SW112") == STAYS


@pytest.mark.parametrize(
    ("seeding", "told", "expected"),
    [
        ("torch.manual_seed(seed + rank)", "", TOLD),
        ("offset = dist.get_rank()\ntorch.manual_seed(1337 + offset)", "", TOLD),
        ("utils.set_seed(args.seed, rank)", "", TOLD),
        ("torch.manual_seed(seed + rank)", ", sync_module_states=True", []),
        ("torch.manual_seed(seed)", "", []),
        ("random.seed(seed + rank)", "", []),
        ("generator.manual_seed(seed + rank)", "", []),
        ("sampler = DistributedSampler(data, seed=seed + rank)", "", []),
    ],
)
def test_ranks_that_draw_apart_are_reported_and_not_given_to_shardwise(seeding: str, told: str, expected: list[Status]):
    text, findings = moved(f"{seeding}\nmodel = FSDP(model{told})\n", "shardwise")
    assert status_of(findings, "SW134") == expected
    assert ("sw.shard(" in text) is not bool(expected)


def test_ranks_seeded_in_the_file_that_calls_are_seen():
    build = IMPORTS + "def build(model):\n    return FSDP(model)\n"
    main = "import torch\nfrom package.build import build\n\ntorch.manual_seed(args.rank)\nbuild(make())\n"
    found = together({"package/build.py": build, "main.py": main}, "shardwise")
    assert status_of(found["package/build.py"][1], "SW134") == TOLD


@pytest.mark.parametrize(("more", "expected"), [("", TOLD), ("model = FSDP(model)\n", [])])
def test_file_is_told_that_models_are_wrapped_elsewhere(more: str, expected: list[Status]):
    _, findings = moved(f"{more}is_sharded = isinstance(model, FSDP)\n")
    assert status_of(findings, "SW133") == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [("", "sw.clip_grad_norm_("), (", foreach=True", "_clip_grad_norm(")],
    ids=["plain", "foreach"],
)
def test_arguments_that_shardwise_does_not_have_go_to_torch(more: str, expected: str):
    text, _ = moved(
        f"model = FSDP(model)\nnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0{more})\n", "shardwise"
    )
    assert f"norm = {expected}model.parameters(), 1.0{more})" in text


@pytest.mark.parametrize(("before", "expected"), [("", "sw.shard"), ("parallelize_module(model, tp)", "fully_shard")])
def test_model_of_dtensors_goes_to_fully_shard(before: str, expected: str):
    text, _ = moved(f"{before}\nmodel = FSDP(model)\n", "shardwise")
    assert f"model = {expected}(model" in text


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "self.nets.generator.clip_grad_norm_(self.max_norm)",
            "torch.nn.utils.clip_grad_norm_(self.nets.generator.param",
        ),
        ("self.accelerator.clip_grad_norm_(parameters, 1.0)", "self.accelerator.clip_grad_norm_(parameters, 1.0)"),
        ("with self.nets.generator.no_sync():\n    pass", "with _no_sync(self.nets.generator):"),
        ("with self.accelerator.no_sync(model):\n    pass", "with self.accelerator.no_sync(model):"),
        ("with self.runner.no_sync(model):\n    pass", "with self.runner.no_sync(model):"),
        ("model.forward(batch)", "model(batch)"),
        ("plain.forward(batch)", "plain.forward(batch)"),
    ],
)
def test_methods_of_models_are_known_by_how_they_are_called(call: str, expected: str):
    text, _ = moved(f"model = FSDP(model)\n{call}\n")
    assert f"\n{expected}" in text


@pytest.mark.parametrize(
    "body",
    [
        "model = FSDP(model, ignored_modules=some)\nmodel.clip_grad_norm_(1.0)\n",
        "model = FSDP(model, **settings)\nmodel.clip_grad_norm_(1.0)\n",
        "class Both(nn.Module):\n    def __init__(self):\n        self.tower, self.head = FSDP(tower), head\n\n\n"
        "model = Both()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
    ],
    ids=["ignored", "at_run_time", "wrapped_in_part"],
)
def test_gradients_that_are_sharded_in_part_are_clipped_by_a_function_for_both(body: str):
    text, findings = moved(body)
    assert text.endswith("_clip_grad_norm(model.parameters(), 1.0)\n")
    assert "SW120" in [one.code for one in findings]


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("sum(p.numel() for p in model.parameters())", TOLD),
        ("[p.grad.norm() for _, p in model.named_parameters()]", TOLD),
        ("timm.optim.add_weight_decay(model, 0.1)", TOLD),
        ("[p.shape for p in model.parameters()]", []),
        ("sum(p.numel() for p in plain.parameters())", []),
    ],
)
def test_numbers_that_were_of_one_ranks_part_are_reported(loop: str, expected: list[Status]):
    _, findings = moved(f"model = FSDP(model)\nnumbers = {loop}\n")
    assert status_of(findings, "SW135") == expected


@pytest.mark.parametrize(("group", "expected"), [("one", []), ("another", TOLD)])
def test_parameters_of_models_on_different_meshes_side_by_side_are_reported(group: str, expected: list[Status]):
    body = f"model = FSDP(model, process_group=one)\nema = FSDP(ema, process_group={group})\n"
    body += "for p, q in zip(ema.parameters(), model.parameters()):\n    p.lerp_(q, 0.1)\n"
    _, findings = moved(body)
    assert status_of(findings, "SW135") == expected


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("torch.optim.Optimizer", TOLD),
        ("Below", TOLD),
        ("Callback", []),
        ("torch.optim.lr_scheduler._LRScheduler", []),
    ],
)
def test_optimizer_of_the_programs_own_is_told_what_it_gets(base: str, expected: list[Status]):
    body = f"class Below(torch.optim.SGD):\n    pass\n\n\nclass Mine({base}):\n    def step(self):\n        pass\n\n\n"
    _, findings = moved(f"{body}model = FSDP(model)\n")
    assert status_of(findings, "SW135") == expected


def test_branch_for_fsdp1_that_adds_up_over_ranks_is_reported():
    body = "model = FSDP(model)\nif isinstance(model, FSDP):\n    dist.all_reduce(norm)\n"
    _, findings = moved(body)
    assert status_of(findings, "SW135") == TOLD


def test_pattern_that_matches_the_class_is_a_type_check():
    text, findings = moved("model = FSDP(model)\nmatch model:\n    case FSDP():\n        print(1)\n")
    assert "    case FSDPModule():\n" in text
    assert status_of(findings, "SW123") == GOES


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("torch.cuda.current_device()", "fully_shard(model)"),
        ("torch.cpu.current_device()", 'fully_shard(model, mesh=init_device_mesh("cpu"'),
        (
            "torch.cuda.current_device() if fast else torch.cpu.current_device()",
            "fully_shard(model, mesh=_mesh(device_id=",
        ),
    ],
)
def test_current_device_of_the_cpu_is_the_cpu(device: str, expected: str):
    text, _ = moved(f"model = FSDP(model, device_id={device})\n")
    assert f"model = {expected}" in text


def test_recomputation_by_a_function_that_settings_name_is_reported():
    body = "wrapper, apply_selective_ac = get_policies(cfg)\nmodel = FSDP(model)\napply_selective_ac(model, p=1)\n"
    _, findings = moved(body)
    assert status_of(findings, "SW125") == STAYS


def test_question_for_no_sync_is_answered_for_fsdp2_too():
    body = 'model = FSDP(model)\nif hasattr(model, "no_sync"):\n    with model.no_sync():\n        step()\n'
    text, _ = moved(body)
    assert 'if (hasattr(model, "no_sync") or isinstance(model, FSDPModule)):\n    with _no_sync(model):\n' in text


def test_models_of_a_framework_that_stays_with_fsdp1_stay():
    strategy = (
        "from lightning.pytorch.strategies import FSDPStrategy\n\nstrategy = FSDPStrategy(auto_wrap_policy={Block})\n"
    )
    check = f"{IMPORTS}def clip(model):\n    if isinstance(model, FSDP):\n        model.clip_grad_norm_(1.0)\n"
    text, findings = together({"main.py": strategy, "clip.py": check})["clip.py"]
    assert text == check
    assert {finding.status for finding in findings} == {Status.NEEDS_DECISION}


INHERITED = """
class Mine(FSDP):
    def __init__(self, module, **settings):
        super().__init__(module, **settings)

    def clip(self):
        return super().clip_grad_norm_(1.0)


def run(model):
    model = Mine(model)
    model.clip_grad_norm_(1.0)
    with Mine.summon_full_params(model):
        return model.module.head.state_dict()
"""


def test_subclass_inherits_from_a_class_that_shards_and_what_it_lacks_is_reported():
    text, findings = moved(INHERITED)
    assert "class Mine(_ShardedWrapper):" in text
    assert "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in text
    assert status_of(findings) == GOES
    assert status_of(findings, "SW102") == GOES + STAYS
    assert status_of(findings, "SW131") == STAYS


@pytest.mark.parametrize(("base", "expected"), [("FSDP", True), ("torch.nn.Module", False)])
def test_class_of_another_file_is_followed_to_its_base(base: str, expected: bool):
    mine = f"{IMPORTS}class Mine({base}):\n    pass\n"
    main = "import mine\nfrom mine import Mine\n\n\ndef run(model):\n    return Mine(model).no_sync()\n"
    text, findings = together({"mine.py": mine, "main.py": main})["main.py"]
    assert ("_no_sync(Mine(model))" in text) is expected
    assert status_of(findings) == (GOES if expected else [])


def test_method_that_a_subclass_has_of_its_own_is_called_as_it_is():
    body = "class Mine(FSDP):\n    def state_dict(self):\n        return 1\n\n\nstate = Mine(model).state_dict()\n"
    text, findings = moved(body)
    assert "state = Mine(model).state_dict()" in text
    assert not status_of(findings, "SW111")


def test_class_chosen_at_run_time_may_be_asked_for_its_name():
    body = "if sharded:\n    Wrapper = FSDP\nelse:\n    Wrapper = DDP\nprint(Wrapper.__name__)\nm = Wrapper(m)\n"
    text, findings = moved(body)
    assert "Wrapper = _fully_shard_like_fsdp1" in text
    assert {one.status for one in findings} == {Status.REWRITTEN}


def test_function_of_the_program_that_is_named_like_a_helper_stays_its_own():
    own = "def _no_sync(model):\n    return 7\n\n\n"
    text, _ = moved(own + "model = FSDP(model)\nx = _no_sync(model)\nwith model.no_sync():\n    step()\n")
    assert own in text
    assert "x = _no_sync(model)\nwith _fsdp2_no_sync(model):" in text
    assert "def _fsdp2_no_sync(model):" in text
    assert moved(text, imports="")[0] == text


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("FSDP.clip_grad_norm_(model, max_norm=1.0)", "torch.nn.utils.clip_grad_norm_(model.parameters(), max"),
        ("fsdp.FullyShardedDataParallel.clip_grad_norm_(model, 1.0)", "torch.nn.utils.clip_grad_norm_(model.param"),
        ("clip = FSDP.clip_grad_norm_\nclip(model, 1.0)", "clip = FSDP.clip_grad_norm_\ntorch.nn.utils.clip_"),
        ("with FSDP.no_sync(model):\n    pass", "with _no_sync(model):"),
        ("FSDP.forward(\n    model,  # it\n    batch,\n)", "model(\n    # it\n    batch,\n)"),
        ("state = FSDP.state_dict(model)", "state = get_model_state_dict(model, options="),
        ("for one in FSDP.modules(model):\n    pass", "for one in model.modules():"),
        ("FSDP.clip_grad_norm_(build(), 1.0)", "FSDP.clip_grad_norm_(build(), 1.0)"),
    ],
)  # fmt: skip
def test_methods_called_on_the_class_with_the_model_first_are_methods_of_the_model(call: str, expected: str):
    text, findings = moved(f"import torch.distributed.fsdp as fsdp\n\nmodel = FSDP(model)\n{call}\n")
    assert f"\n{expected}" in text
    assert (status_of(findings, "SW131") == STAYS) is ("FSDP." in expected)


def test_file_without_anything_to_rewrite_keeps_its_calls_on_the_class():
    text = f"{IMPORTS}def clip(model):\n    FSDP.clip_grad_norm_(model, 1.0)\n"
    found = together({"clip.py": text, "build.py": f"{IMPORTS}import clip\nmodel = FSDP(model, device_ids=[0])\n"})
    assert found["clip.py"][0] == text


INITIALISE = """
def prepare(self, *things):
    made = [FSDP(one) if isinstance(one, torch.nn.Module) else None for one in things]
    for one in [*things, *made]:
        if isinstance(one, torch.nn.Module):
            continue
        elif isinstance(one, torch.optim.Optimizer):
            one = self.build_optimizer(one)
            one.load_state_dict(state)
        made.append(one)
    return made
"""


def test_object_that_a_check_says_is_no_module_is_not_treated_as_a_model():
    text, findings = moved(INITIALISE)
    assert "    one = self.build_optimizer(one)\n            one.load_state_dict(state)\n" in text
    assert not {one.code for one in findings} & {"SW111", "SW138"}


SCALER = "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n\n"


@pytest.mark.parametrize(
    ("wrap", "own"),
    [
        ("FSDP(model)", False),
        ("FSDP(model, ignored_modules=[model.head])", True),
        ("FSDP(model, process_group=group)", True),
        ("FSDP(model.half())", True),
    ],
)
def test_scaler_meets_whole_or_float16_gradients_or_ranks_outside_of_the_mesh(wrap: str, own: bool):
    body = f"model = {wrap}\nscaler = ShardedGradScaler(enabled=fp16, process_group=group)\n"
    text, _ = moved(f"{SCALER}{body}is_one = isinstance(scaler, ShardedGradScaler)\n")
    expected = "_GradScaler(enabled=fp16, process_group=group)" if own else "torch.amp.GradScaler(enabled=fp16)"
    assert f"scaler = {expected}\n" in text
    assert "isinstance(scaler, torch.amp.GradScaler)" in text


@pytest.mark.parametrize(
    ("before", "given", "expected"),
    [
        ("", "", []),
        ("", ", ignored_states=some", STAYS),
        ("settings = {'ignored_states': some}\n", ", **settings", STAYS),
        ("settings = read()\n", ", **settings", []),
    ],
)
def test_torchs_own_scaler_is_reported_where_some_gradients_are_whole(before: str, given: str, expected: list[Status]):
    _, findings = moved(f"{before}model = FSDP(model{given})\nscaler = torch.cuda.amp.GradScaler()\n")
    assert status_of(findings, "SW122") == expected


@pytest.mark.parametrize("low", ["model.half()", "load(path, torch_dtype=kind)", "model.to(device, torch.bfloat16)"])
def test_norm_of_parameters_in_low_precision_is_taken_by_a_function_of_its_own(low: str):
    text, _ = moved(f"model = {low}\nmodel = FSDP(model)\nmodel.clip_grad_norm_(1.0)\n")
    assert text.endswith("\n_clip_grad_norm(model.parameters(), 1.0)\n")


COLLECTIVES = {
    "loop": ("for p in model.parameters():\n    dist.broadcast(p.data, 0)\n", STAYS),
    "named": ("for _, p in model.named_parameters():\n    if p.is_sharded:\n        dist.all_reduce(p.grad)\n", STAYS),
    "one": ("dist.broadcast(model.head.weight, src=0)\n", STAYS),
    "inner": ("for m in model.modules():\n    for v in m._parameters.values():\n        dist.broadcast(v, 0)\n", STAYS),
    "copied_dict": ("for m in model.modules():\n    members = dict(m._parameters.items())\n"
                    "    for k, v in members.items():\n        dist.broadcast(v, 0)\n", STAYS),
    "list": ("def norm(model):\n    found = []\n    for p in model.parameters():\n        found.append(p.grad.sum())\n"
             "    dist.all_reduce(torch.stack(found))\n\n\nnorm(model)\n", STAYS),
    "local": ("for p in model.parameters():\n    dist.broadcast(p.to_local(), 0)\n", []),
    "number": ("for p in model.parameters():\n    dist.all_reduce(p.grad.sum().item())\n", []),
    "loss": ("loss = criterion(model(batch))\ndist.all_reduce(loss, group=model.group)\n", []),
    "before": ("", []),
    "optimizer": ("class Mine(torch.optim.AdamW):\n    def clip(self):\n        dist.all_reduce(self.norm)\n", STAYS),
    "other": ("class Mine:\n    def clip(self):\n        dist.all_reduce(self.norm)\n", []),
    "copied": ("for p in model.parameters():\n    p.data.copy_(torch.zeros(2))\n", STAYS),
    "scaled": ("for p in model.parameters():\n    p.data.mul_(0.9)\n", []),
    "averaged": ("new = torch.zeros(2)\nfor p in model.parameters():\n    new.lerp_(p.data, 0.1)\n", STAYS),
    "kernels": ("import bitsandbytes as bnb\noptimizer = bnb.optim.AdamW8bit(model.parameters())\n", STAYS),
    "kernels_of_groups": ("import apex\n\n\ndef groups(model):\n    found = []\n    for p in model.parameters():\n"
                          "        found.append(p)\n    return [{'params': found}]\n\n\n"
                          "made = groups(model)\noptimizer = apex.optimizers.FusedAdam(made)\n", STAYS),
    "kernels_of_another": ("import apex\nother = build()\nopt = apex.optimizers.FusedAdam(other.parameters())\n", []),
    "torchs": ("optimizer = torch.optim.AdamW(model.parameters())\n", []),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_raises_for_dtensors_is_reported(name: str):
    use, expected = COLLECTIVES[name]
    before = "for p in model.parameters():\n    dist.broadcast(p.data, 0)\n" if name == "before" else ""
    _, findings = moved(f"model = build()\n{before}model = FSDP(model)\n{use}")
    assert status_of(findings, "SW135") == expected


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("    optimizer.step()\n    optimizer.zero_grad()\n", GOES),
        ("    if bad:\n        optimizer.zero_grad()\n        continue\n    optimizer.step()\n", TOLD + GOES),
        ("    optimizer.zero_grad()\n    model(x).backward()\n    optimizer.step()\n", GOES),
    ],
    ids=["after_the_step", "thrown_away", "each_turn"],
)
def test_gradients_of_no_sync_that_are_thrown_away_are_reported(loop: str, expected: list[Status]):
    _, findings = moved(
        f"model = FSDP(model)\nfor x in data:\n    with model.no_sync():\n        model(x).backward()\n{loop}"
    )
    assert sorted(status_of(findings, "SW121")) == sorted(expected)


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ('"flat_param" not in name', STAYS),
        ('name.endswith("._flat_param")', STAYS),
        ('name.replace("flat_param", "") in names', []),
    ],
)
def test_choice_by_the_name_of_flat_parameters_is_reported(test: str, expected: list[Status]):
    _, findings = moved(f"model = FSDP(model)\nfound = [p for name, p in model.named_parameters() if {test}]\n")
    assert status_of(findings, "SW127") == expected


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("model.gradient_checkpointing_enable()", TOLD),
        ('model.gradient_checkpointing_enable({"use_reentrant": False})', []),
        ("y = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=True)", TOLD),
        ("y = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)", []),
    ],
)
def test_reentrant_checkpointing_is_reported(how: str, expected: list[Status]):
    _, findings = moved(f"{how}\nmodel = FSDP(model)\n")
    assert status_of(findings, "SW125") == expected


@pytest.mark.parametrize(
    ("late", "changed"),
    [
        ("def load(model, state):\n    torch = get_torch()\n    model.load_state_dict(state)\n", False),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None\n\n\n"
         "def load(model, state):\n    model.load_state_dict(state)\n", False),
        ("def load(model, state):\n    model.load_state_dict(state)\n", True),
        ("import torch\n\n\ndef load(model, state):\n    model.load_state_dict(state)\n", True),
    ],
    ids=["in_a_function", "in_try", "never", "at_once"],
)  # fmt: skip
def test_file_that_may_run_without_torch_does_not_import_it(late: str, changed: bool):
    main = f"{IMPORTS}from late import load\n\nmodel = FSDP(build())\nload(model, state)\n"
    text, findings = together({"main.py": main, "late.py": late})["late.py"]
    assert (text != late) is changed
    assert status_of(findings, "SW111") == (GOES if changed else STAYS)


def test_file_that_wraps_models_says_that_it_imports_torch_at_once_now():
    late = "try:\n    import torch\n    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
    late += "except ImportError:\n    torch = None\n"
    texts = {"main.py": f"{late}\n\ndef wrap(model):\n    return FSDP(model)\n"}
    assert status_of(together(texts)["main.py"][1], "SW137") == TOLD


def test_inner_module_taken_where_there_is_one_is_none_to_decide():
    asks = 'if hasattr(model, "_fsdp_wrapped_module"):'
    unwrap = f"def unwrap(model):\n    {asks}\n        return unwrap(model._fsdp_wrapped_module)\n    return model\n"
    _, findings = moved(f"{unwrap}\n\nmodel = unwrap(torch.compile(FSDP(model)))\n")
    assert not status_of(findings, "SW127")


def test_question_whether_the_class_could_be_imported_is_none_to_decide():
    _, findings = moved("model = FSDP(model)\nis_sharded = FSDP is not None and isinstance(model, FSDP)\n")
    assert not status_of(findings, "SW102")


@pytest.mark.parametrize(
    ("setting", "is_told"), [("", True), (", use_orig_params=False", True), (", use_orig_params=True", False)]
)
def test_groups_by_names_of_parameters_are_told_unless_fsdp1_kept_the_names(setting: str, is_told: bool):
    _, findings = moved(
        f"model = FSDP(model{setting})\ndecay = [p for name, p in model.named_parameters() if 'bias' not in name]\n"
        "optimizer = torch.optim.AdamW([{'params': decay, 'weight_decay': 0.1}])\n"
    )
    told = [finding.message for finding in findings if finding.code == "SW101"]
    assert [("check optimizer groups" in message) for message in told] == [is_told]


TYPES = {
    "name": ("type(m).__name__ == 'Block'", TOLD),
    "names": ("m.__class__.__name__ in ('Block', 'Other')", TOLD),
    "class": ("type(m) is Block", TOLD),
    "part_of_the_name": ("'Block' in type(m).__name__", []),
    "layer": ("type(m).__name__ == 'Linear' or type(m) is nn.LayerNorm", []),
    "instance": ("isinstance(m, Block)", []),
    "another": ("type(config) is Block", []),
}


@pytest.mark.parametrize("name", TYPES)
def test_exact_types_of_sharded_modules_are_reported(name: str):
    test, expected = TYPES[name]
    loop = f"for m in model.modules():\n    if {test}:\n        m.gate = True\n"
    _, findings = moved(f"model = FSDP(build())\n{loop}")
    assert status_of(findings, "SW123") == expected
    _, findings = moved(f"model = build()\n{loop}model = FSDP(model)\n")
    assert not status_of(findings, "SW123")


def test_numbers_are_reported_where_a_file_tells_fsdp2_apart_as_well():
    branch = "if fsdp_version == 1:\n    model = FSDP(build())\nelse:\n    model = plain(build())\n"
    _, findings = moved(f"{branch}for p in model.parameters():\n    dist.all_reduce(p.grad)\n")
    assert status_of(findings, "SW135") == STAYS


TRAINER = """import torch
import torch.distributed as dist


class Trainer:
    def __init__(self, net):
        self.net = net

    def norm(self):
        norm = torch.stack([p.grad.norm() for p in self.net.parameters()])
        dist.all_reduce(norm)
"""
CHOSEN = {
    "from_a_table": "from trainer import Trainer\n\n_ALL = {'one': Trainer}\n",
    "by_its_name": "import importlib\n\n_ALL = {'one': getattr(importlib.import_module('trainer'), 'Trainer')}\n",
}
CHOOSING = """from choosing import choose


class Wrapper(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = FSDP(inner)


kind = choose(name)
kind(Wrapper(build())).norm()
"""


@pytest.mark.parametrize("kind", CHOSEN)
def test_models_are_followed_into_classes_chosen_at_run_time(kind: str):
    choosing = CHOSEN[kind] + "\n\ndef choose(name):\n    return _ALL[name]\n"
    found = together({"train.py": IMPORTS + CHOOSING, "choosing.py": choosing, "trainer.py": TRAINER})
    told = [one.line for one in found["trainer.py"][1] if one.code == "SW135" and one.status is Status.NEEDS_DECISION]
    assert told == [11]


def test_models_are_not_followed_into_classes_that_a_file_only_mentions():
    mentioning = "from trainer import Trainer\n\n\ndef choose(name):\n    isinstance(name, Trainer)\n    return run\n"
    found = together({"train.py": IMPORTS + CHOOSING, "choosing.py": mentioning, "trainer.py": TRAINER})
    assert "SW135" not in [one.code for one in found["trainer.py"][1]]
