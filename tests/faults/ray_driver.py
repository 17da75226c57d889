"""A driver of Ray Train for the tests: python -m tests.faults.ray_driver FOLDER MAX_FAILURES [--set a.b=c ...]."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train

from shardwise.config.load import load
from shardwise.config.run import RunConfig
from shardwise.errors import ShardwiseError
from shardwise.integrations.ray_train import train_on_ray


class WriteReports(ray.train.UserCallback):
    """Keeps what Ray was told, where the test finds it."""

    def __init__(self, file: str) -> None:
        self._file = file

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """All workers have reported."""
        with open(self._file, "a") as file:
            file.write(json.dumps(metrics) + "\n")


def main() -> None:
    """Train on two workers of a Ray of our own, and print what was done."""
    folder, max_failures, *settings = sys.argv[1:]
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "300"  # two cores, and torch to import
    ray.init(
        address="local",
        _system_config={"worker_register_timeout_seconds": 300},
        num_cpus=2,
        object_store_memory=80 * 1024 * 1024,
        include_dashboard=False,
        runtime_env={"env_vars": {name: os.environ[name] for name in ("PYTHONPATH", "RUN_FILES", "OMP_NUM_THREADS")}},
    )
    try:
        training = train_on_ray(
            load(RunConfig, Path(folder, "run.yaml"), settings),
            num_workers=2,
            max_failures=int(max_failures),
            report_every=5,
            storage_path=str(Path(folder, "ray")),
            callbacks=[WriteReports(str(Path(folder, "reports.jsonl")))],
        )
    except ShardwiseError as error:
        print(f"RAISED {type(error).__name__}: {error}", flush=True)
        sys.exit(error.exit_code)
    finally:
        ray.shutdown()
    print("TRAINING " + json.dumps(training.to_dict()), flush=True)


if __name__ == "__main__":
    main()
