"""The files of examples/cluster are well formed, and their commands are commands of torchrun and of ours."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli.main import app
from shardwise.config.load import load
from shardwise.config.run import RunConfig

CLUSTER = Path(__file__).parents[2] / "examples/cluster"
SCRIPTS = sorted(path.name for path in CLUSTER.glob("*.sbatch"))
MANIFESTS = sorted(path.name for path in CLUSTER.glob("kubernetes_*.yaml"))


def parse_ours(arguments: list[str]) -> dict[str, Any]:
    """The options of a `shardwise` command as the command itself reads them; a wrong one ends the test."""
    import typer

    group: Any = typer.main.get_command(app)
    name, *rest = arguments
    return group.commands[name].make_context(name, rest).params


def parse_torchrun(arguments: list[str]) -> Any:
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(arguments)


def command_in(text: str, start: str) -> list[str]:
    """A command of a shell script as words, its variables as letters; continued lines are one."""
    joined = text.replace("\\\n", " ")
    line = next(line for line in joined.splitlines() if line.strip().startswith(start))
    return shlex.split(re.sub(r"\$\{?\w+\}?", "1", line).removesuffix("&"))


def documents(name: str) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in yaml.safe_load_all((CLUSTER / name).read_text())}


def test_everything_in_the_folder_is_known():
    assert SCRIPTS == ["slurm.sbatch", "slurm_torchrun.sbatch"]
    assert MANIFESTS == ["kubernetes_job.yaml", "kubernetes_pytorchjob.yaml"]
    table = (CLUSTER / "README.md").read_text()
    names = {file.name for file in CLUSTER.iterdir()} - {"README.md"}
    assert {name for name in names if f"`{name}`" in table or f"({name})" in table} == names


def test_the_run_file_is_a_run():
    config = load(RunConfig, CLUSTER / "run.yaml")
    assert config.training.stop_signals == RunConfig().training.stop_signals
    assert config.folder is None, "each launcher sets its own"


@pytest.mark.parametrize("name", SCRIPTS)
def test_slurm_script_is_bash_with_options_that_fit(name: str):
    text = (CLUSTER / name).read_text()
    subprocess.run(["bash", "-n", str(CLUSTER / name)], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(options) == text.count("#SBATCH"), "each line is an option"
    assert options["gpus-per-node"] == ("8" if name == "slurm_torchrun.sbatch" else options["ntasks-per-node"])
    assert "requeue" in options
    notice, before_s = re.fullmatch(r"(?:B:)?(\w+)@(\d+)", options["signal"]).groups()
    assert f"SIG{notice}" in load(RunConfig, CLUSTER / "run.yaml").training.stop_signals
    # torchrun kills its ranks unless it is told to wait for the last checkpoint; srun does not.
    timeouts = [int(seconds) for seconds in re.findall(r"--shutdown-timeout (\d+)", text)]
    assert len(timeouts) == ("torchrun" in name)
    assert all(30 < timeout_s < int(before_s) for timeout_s in timeouts)


def test_srun_starts_our_command():
    words = command_in((CLUSTER / "slurm.sbatch").read_text(), "srun")
    ours = words[words.index("shardwise") + 1 :]
    assert parse_ours(ours)["settings"] == ["folder=1"]


def test_srun_starts_torchrun_with_our_command():
    words = command_in((CLUSTER / "slurm_torchrun.sbatch").read_text(), "srun")
    assert words[:2] == ["srun", "torchrun"]
    options = parse_torchrun(words[2:])
    assert (options.module, options.training_script) == (True, "shardwise")
    assert "SIGUSR1" in options.signals_to_handle.split(",")
    assert parse_ours(options.training_script_args)["settings"] == ["folder=1"]


def test_the_command_by_hand_in_the_readme():
    words = command_in((CLUSTER / "README.md").read_text(), "torchrun --nnodes")
    options = parse_torchrun(words[1:])
    assert (options.module, options.training_script, options.rdzv_backend) == (True, "shardwise", "c10d")
    assert parse_ours(options.training_script_args)["run"] == Path("RUN.yaml")


def test_kubernetes_job_joins_its_pods():
    kinds = documents("kubernetes_job.yaml")
    service, job, run = kinds["Service"], kinds["Job"], kinds["ConfigMap"]
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    name, size = job["metadata"]["name"], job["spec"]["completions"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == size, "torchrun waits for all of them"
    options = parse_torchrun(container["args"])
    assert container["command"] == ["torchrun"]
    assert options.rdzv_endpoint.split(":")[0] == f"{name}-0.{pod['subdomain']}"
    assert options.nnodes == str(size)
    assert options.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert options.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    check_run(options, container, pod, run)


def test_pytorchjob_leaves_the_machines_to_the_operator():
    job = documents("kubernetes_pytorchjob.yaml")["PyTorchJob"]
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    container = pod["containers"][0]
    assert container["name"] == "pytorch"
    policy = job["spec"]["elasticPolicy"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    assert job["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    options = parse_torchrun(container["args"])
    assert options.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    check_run(options, container, pod, documents("kubernetes_job.yaml")["ConfigMap"])


def check_run(options: Any, container: dict[str, Any], pod: dict[str, Any], run: dict[str, Any]) -> None:
    """The command reads the run file of the ConfigMap, which writes to storage that outlives the pod."""
    assert (options.module, options.training_script) == (True, "shardwise")
    file = parse_ours(options.training_script_args)["run"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts) == set(volumes)
    assert volumes["run"]["configMap"]["name"] == run["metadata"]["name"]
    assert file.parent == mounts["run"]
    config = load(RunConfig, yaml.safe_load(run["data"][file.name]))
    assert mounts["storage"] in Path(config.folder or "").parents
    assert "persistentVolumeClaim" in volumes["storage"]


@pytest.mark.slow
def test_the_ray_script_takes_the_command_in_its_header():
    header = (CLUSTER / "ray_train.py").read_text().split('"""')[1]
    words = shlex.split(header.strip().splitlines()[-1])
    script = words.index("examples/cluster/ray_train.py")
    command = [sys.executable, *words[script:], "--set", "training.steps=0.5"]
    run = subprocess.run(command, cwd=CLUSTER.parents[1], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2, run.stderr
    assert "training.steps" in run.stderr, "its own arguments were taken, and the setting refused by ours"
