"""Ray Train on a cluster: Ray places the ranks and starts them again, the run continues from its last checkpoint.

pip install 'shardwise[ray]', then, where a Ray cluster runs (`ray start`, KubeRay, Anyscale):
ray job submit --working-dir . -- python examples/cluster/ray_train.py examples/cluster/run.yaml --workers 16 --gpu
"""

import argparse
import sys

from shardwise.config.load import load
from shardwise.config.run import RunConfig
from shardwise.errors import ShardwiseError
from shardwise.integrations.ray_train import train_on_ray


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a run file with Ray Train.")
    parser.add_argument("run", help="a run file")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="A.B=C", help="change a setting")
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each")
    parser.add_argument("--max-failures", type=int, default=3, help="how often workers are started again")
    options = parser.parse_args(arguments)
    try:
        training = train_on_ray(
            load(RunConfig, options.run, options.settings),
            num_workers=options.workers,
            use_gpu=options.gpu,
            max_failures=options.max_failures,
        )
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(training)
    return 0 if training.stopped is None else 4


if __name__ == "__main__":
    sys.exit(main())
