"""Train with Ray Train: Ray starts and restarts the workers, shardwise trains and resumes (`shardwise[ray]`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import ray
    import ray.exceptions
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer
except ImportError as error:
    raise ImportError("shardwise.integrations.ray_train needs Ray: pip install 'shardwise[ray]'") from error

from shardwise.config.run import RunConfig
from shardwise.distributed.local_ranks import is_lost_peer
from shardwise.distributed.stop_requests import StopRequest, listen_until_exit, stop_requests
from shardwise.errors import ConfigError, EnvironmentProblem, ShardwiseError
from shardwise.training.run_folder import Training, with_folder

_LOOK_S = 1.0


def train_on_ray(
    config: RunConfig,
    *,
    num_workers: int,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    max_failures: int = 3,
    report_every: int = 10,
    name: str | None = None,
    storage_path: str | None = None,
    callbacks: Sequence[ray.train.UserCallback] = (),
) -> Training:
    """Train with one rank per Ray worker, and resume from the last checkpoint if workers die.

    The run itself writes checkpoints and metrics into `config.folder`, a path that all workers must share. Metrics are
    also reported to Ray. On SIGTERM, SIGINT and SIGUSR1 to this process, the run saves a checkpoint and returns (see
    `training.stop_signals`).

    Args:
        config: The run. Without a folder, a new folder in `runs` in the current folder.
        num_workers: Number of ranks.
        use_gpu: Use one GPU per rank.
        resources_per_worker: As in Ray's `ScalingConfig`.
        max_failures: Maximum number of restarts after failures; -1: no limit. Errors in the run's settings are not
            retried.
        report_every: Number of steps between reports to Ray; in each, all workers wait for each other.
        name: Name of the run in Ray.
        storage_path: Location of Ray's own records of the run.
        callbacks: Ray's callbacks, which receive reports and failures.

    Returns:
        The result of the run, as from `fit`; `stopped` is set if steps remain.

    Raises:
        ShardwiseError: The run cannot start or continue, as in `fit`.
        EnvironmentProblem: Workers failed more than `max_failures` times.

    Ranks:
        Call it from the driver, which is not a rank; `ray.init()` is called if necessary.
    """
    _check(config, num_workers, report_every)
    config = with_folder(config)
    config = replace(config, folder=str(Path(config.folder or "").resolve()))
    if not ray.is_initialized():
        ray.init()
    trainer_class: Any = TorchTrainer  # the type stubs mix Ray's old and new trainers
    api: Any = ray.train
    actor_class: Any = ray.remote(num_cpus=0)(_StopFlag)
    stop_flag = actor_class.remote()
    trainer = trainer_class(
        _train_worker,
        train_loop_config={"config": config, "report_every": report_every, "stop_flag": stop_flag},
        # Checkpoints and checks between ranks use tensors in CPU memory, which need gloo in addition to NCCL.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        scaling_config=api.ScalingConfig(
            num_workers=num_workers,
            use_gpu=use_gpu,
            resources_per_worker=dict(resources_per_worker) if resources_per_worker is not None else None,
        ),
        run_config=api.RunConfig(
            name=name,
            storage_path=storage_path,
            failure_config=api.FailureConfig(max_failures=max_failures),
            callbacks=list(callbacks),
        ),
    )
    try:
        outcome = _fit_until_asked(trainer, config, stop_flag)
    except ray.train.TrainingFailedError as error:
        raise EnvironmentProblem(
            f"Ray's workers failed, also after {max_failures} restarts",
            where=f"Ray run {name or ''}".rstrip(),
            why=str(error).strip().splitlines()[-1],
            fix="see the workers' logs; the same call resumes from the last checkpoint in "
            f"{config.folder} (set folder to it)",
        ) from error
    finally:
        ray.kill(stop_flag)
    if isinstance(outcome, ShardwiseError):
        raise outcome
    return outcome


def _check(config: RunConfig, num_workers: int, report_every: int) -> None:
    for what, value in (("num_workers", num_workers), ("report_every", report_every)):
        if value < 1:
            raise ConfigError(
                f"{what} is {value}", where=what, why="it is a number of workers or steps", fix=f"{what}=1, or more"
            )
    if "://" in (config.folder or ""):
        raise ConfigError(
            f"folder is {config.folder}",
            where="folder",
            why="workers write to one shared folder of their file system",
            fix="set folder to a path on shared storage",
        )


def _fit_until_asked(trainer: TorchTrainer, config: RunConfig, stop_flag: Any) -> Any:
    """Run Ray's `fit` in another thread; this thread handles signals, because Ray would end the workers on SIGINT."""
    done: list[Any] = []

    def fit() -> None:
        try:
            done.append(trainer.fit())
        except BaseException as error:
            done.append(error)

    with stop_requests(config.training.stop_signals) as stop:
        thread = threading.Thread(target=fit, name="shardwise-ray-fit", daemon=True)
        thread.start()
        told = False
        while thread.is_alive():
            thread.join(0.2)
            if stop.asked and not told:
                ray.get(stop_flag.ask.remote(stop.why))
                told = True
    result = done[0]
    if isinstance(result, BaseException):
        raise result
    return result.return_value


class _StopFlag:
    """Carries a stop request from the driver to the workers."""

    def __init__(self) -> None:
        self._why = ""

    def ask(self, why: str) -> None:
        self._why = self._why or why

    def why(self) -> str:
        return self._why


def _train_worker(settings: dict[str, Any]) -> Training | ShardwiseError:
    """Train as one rank. Errors in the config are returned, because Ray retries raised errors."""
    from shardwise.training.loop import fit

    config: RunConfig = settings["config"]

    def report(step: int, values: Mapping[str, Any]) -> None:
        """Report a record to Ray; all workers must report equally often, and rank 0's values are kept."""
        if step % settings["report_every"] == 0 or step == config.training.steps:
            ray.train.report({"step": step, **values})

    stop = StopRequest()
    listen_until_exit(stop, {})  # not the main thread, so it receives no signals
    threading.Thread(target=_follow, args=(settings["stop_flag"], stop), daemon=True).start()
    try:
        return fit(config, on_record=report)
    except ShardwiseError as error:
        if isinstance(error, EnvironmentProblem) or is_lost_peer(error, ""):
            raise
        return error


def _follow(stop_flag: Any, stop: StopRequest) -> None:
    while not stop.asked:
        time.sleep(_LOOK_S)
        try:
            why = ray.get(stop_flag.why.remote())
        except ray.exceptions.RayError:
            return  # the run has ended, or the driver has exited and Ray ends this worker
        if why:
            stop.ask(why)
