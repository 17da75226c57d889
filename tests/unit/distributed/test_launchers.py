"""Launchers' environments, and local ranks started for real."""

import os
import signal
import time

import pytest

from shardwise.distributed.launchers import Launch, first_host, read_launch
from shardwise.distributed.local_ranks import start_local
from shardwise.errors import ConfigError, EnvironmentProblem

pytestmark = pytest.mark.usefixtures("fork_server")

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "123",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[017-018]",
    "SLURM_JOB_ID": "40123",
}


def test_no_launcher_is_a_single_process():
    assert read_launch({}) == Launch()
    assert read_launch({}).init_method is None


def test_torchrun_is_read():
    launch = read_launch(TORCHRUN)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (5, 1, 8, 4)
    assert (launch.source, launch.init_method) == ("torchrun", "env://")


def test_ray_sets_torchruns_variables():
    assert read_launch({**TORCHRUN, "RAY_JOB_ID": "1"}).source == "ray"


def test_slurm_step_is_read():
    launch = read_launch(SLURM)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (6, 2, 7, 3)
    assert launch.init_method == "tcp://node017:20123"


def test_job_and_restarts_are_the_launchers():
    torchrun = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "night"}
    assert (read_launch(torchrun).restarts, read_launch(torchrun).job) == (2, "night")
    assert read_launch({**torchrun, "TORCHELASTIC_RUN_ID": "none"}).job == ""
    slurm = read_launch({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert (slurm.restarts, slurm.job) == (1, "slurm-40123")
    assert (read_launch(TORCHRUN).restarts, read_launch(TORCHRUN).job) == (0, "")


def test_torchrun_inside_slurm_wins():
    assert read_launch({**SLURM, **TORCHRUN}).source == "torchrun"


def test_slurm_batch_script_without_srun_is_a_single_process():
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == Launch()


def test_open_mpi_is_read():
    names = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    launch = read_launch({f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()})
    assert (launch.rank, launch.local_rank, launch.world_size, launch.source) == (3, 1, 4, "mpi")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node[017-032,040],login", "node017"), ("a,b", "a"), ("gpu-1", "gpu-1"), ("n[3,7]", "n3")],
)
def test_first_host_of_a_slurm_list(hosts: str, first: str):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not below the number of ranks, 2"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 is not below"),
    ],
)
def test_contradicting_environment_is_refused(environment: dict[str, str], message: str):
    with pytest.raises(EnvironmentProblem, match=message) as failure:
        read_launch(environment)
    assert failure.value.exit_code == 3
    assert failure.value.fix


def sum_of_ranks(offset: int) -> tuple[int, int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    numbers = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, dist.get_rank())
    dist.destroy_process_group()
    return read_launch().rank, sum(numbers) + offset


def fail_on_rank_one_while_rank_zero_sleeps() -> None:
    if read_launch().rank == 1:
        raise ConfigError("a bad value", fix="a good one")
    time.sleep(60)


def be_killed_on_rank_one() -> None:
    if read_launch().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_local_ranks_meet_and_return():
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    assert start_local(f"{__name__}:sum_of_ranks", 2, (10,)) == [(0, 11), (1, 11)]
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before


def test_error_of_a_local_rank_is_raised_here_once(capfd: pytest.CaptureFixture[str]):
    start = time.monotonic()
    with pytest.raises(ConfigError, match="a bad value") as failure:
        start_local(f"{__name__}:fail_on_rank_one_while_rank_zero_sleeps", 2)
    assert time.monotonic() - start < 30, "the sleeping rank must be stopped"
    assert failure.value.fix == "a good one"
    assert "(raised on rank 1)" in failure.value.__notes__[0]
    assert capfd.readouterr() == ("", "")


def test_killed_local_rank_is_named():
    with pytest.raises(EnvironmentProblem, match="rank 1 was killed by SIGKILL"):
        start_local(f"{__name__}:be_killed_on_rank_one", 2)


def test_unknown_target_is_raised_here():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        start_local("no_such_module:main", 1)
