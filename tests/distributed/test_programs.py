"""Training programs that do unusual things with a model train sharded as in one process, or are refused by name."""

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardwiseError
from shardwise.sharding.apply import shard
from tests.ranks import ranks
from tests.zoo import more_programs, outside_programs
from tests.zoo.programs import PROGRAMS, Program

ADDED = (more_programs, outside_programs)  # to PROGRAMS, when they are imported
REFUSED = {
    "adaptive_weight": "gradients with respect to parameters",
    "averaged_model": "copy.deepcopy of a sharded",
    "backward_inside_forward": "backward() inside the forward",
    "deep_copy": "copy.deepcopy of a sharded",
    "gradients_by_parameters": "gradients with respect to parameters",
    "lazy_modules_not_yet_built": "parameters without a shape yet",
    "norm_of_gradients_by_item": "a norm or a sum over a sharded tensor",
    "weights_of_losses_read_before": "was combined with what the model returned",
}
FAST = [
    "in_place_on_inputs", "target_network", "hooks_on_parameters", "regulariser_after_forward", "deep_copy",
    "gradients_cleared_between_forward_and_backward", "norm_of_gradients_by_item", "matrices_in_losses",
    "modules_that_return_parameters", "recomputed_and_run_again", "blocks_that_yield", "parameters_kept_in_objects",
    "rows_of_weights_in_losses", "references_from_before_sharding", "weights_of_losses",
]  # fmt: skip
JOBS = 4


def values_of(modules: Any) -> list[dict[str, Tensor]]:
    """Parameters and buffers of each module, whole."""
    found = []
    for module in modules if isinstance(modules, tuple) else (modules,):
        named = [*module.named_parameters(), *module.named_buffers()]
        found.append({name: t.detach().full_tensor() if isinstance(t, DTensor) else t.detach() for name, t in named})
    return found


def run(program: Program, rank: int | None) -> list[dict[str, Tensor]]:
    """What a program makes of its models, on this rank's rows or in one process."""
    torch.manual_seed(0)
    if rank is None:
        return values_of(program(lambda model: model, lambda rows: rows))
    return values_of(program(shard, lambda rows: rows.chunk(2)[rank].clone()))


def problem_of(name: str, rank: int) -> str:
    """What is wrong with a program; nothing is if it is empty."""
    expected = run(PROGRAMS[name], None)
    assert all(bool(value.isfinite().all()) for values in expected for value in values.values())
    try:
        found = run(PROGRAMS[name], rank)
    except ShardwiseError as error:
        return "" if name in REFUSED and REFUSED[name] in str(error) else f"refused: {error}"
    except Exception:
        return traceback.format_exc()
    if name in REFUSED:
        return "is no longer refused"
    for theirs, ours in zip(expected, found, strict=True):
        for key, value in theirs.items():
            if not torch.allclose(ours[key], value, rtol=1e-5, atol=1e-5):
                return f"{key} differs by {float((ours[key] - value).abs().max()):.1e}"
    return ""


def check(names: list[str], rank: int) -> None:
    problems = {name: problem for name in names if (problem := problem_of(name, rank))}
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())


@ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_some_programs_equal_one_process(rank: int):
    check(FAST, rank)


@pytest.mark.slow
@pytest.mark.parametrize("job", range(JOBS))
@ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_programs_equal_one_process_or_are_refused(rank: int, job: int):
    check([name for name in PROGRAMS if name not in FAST][job::JOBS], rank)


def test_there_are_no_fewer_programs_than_before():
    assert len(PROGRAMS) >= 86
    assert len(REFUSED) <= 8
