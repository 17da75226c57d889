"""openpi's procedure on transformers' PI0, three ways: each equals one process, and continues from its checkpoint."""

import difflib
from pathlib import Path

import pytest
import torch

from shardwise.distributed.local_ranks import start_local

pytestmark = pytest.mark.usefixtures("fork_server")

FOLDER = Path(__file__).parents[2] / "examples/robotics_policy"
# Of the mean loss, over six steps of AdamW: float32 adds in another order; bfloat16 rounds to 3 digits.
TOLERANCES = {"train_fsdp1": 1e-4, "train_one_import": 1e-4, "train": 3e-2}


def losses(script: str, num_ranks: int, resume: bool) -> torch.Tensor:
    """The mean loss of the ranks at each step."""
    of_ranks = start_local(f"tests.examples.test_robotics_policy:run_{script}", num_ranks, (resume,))
    return torch.tensor(of_ranks).mean(0)


def run_train(resume: bool) -> list[float]:
    from examples.robotics_policy.train import main

    return main(6, resume=resume)


def run_train_fsdp1(resume: bool) -> list[float]:
    from examples.robotics_policy.train_fsdp1 import main

    return main(6, resume=resume)


def run_train_one_import(resume: bool) -> list[float]:
    from examples.robotics_policy.train_one_import import main

    return main(6, resume=resume)


SLOW = {"train_fsdp1", "train_one_import"}


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TOLERANCES]
)
def test_two_ranks_that_resume_train_as_one_process_that_does_not(script: str):
    actual, expected = losses(script, 2, True), losses(script, 1, False)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCES[script], atol=0)


def test_only_imports_differ_between_the_fsdp1_scripts():
    texts = [(FOLDER / f"{name}.py").read_text().splitlines() for name in ("train_fsdp1", "train_one_import")]
    added = [line[2:] for line in difflib.ndiff(*texts) if line.startswith("+ ") and line[2:]]
    assert [line for line in added if "torchrun" not in line] == [
        "from shardwise.fsdp1 import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType",
        "from shardwise.fsdp1 import FullyShardedDataParallel as FSDP",
    ]
