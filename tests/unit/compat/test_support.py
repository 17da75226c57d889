"""Which torch works: nothing is said on a tested one; another is looked at by the first `shard()`."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise import compat
from shardwise.compat.support import NEEDED, TESTED, missing_attributes

ROOT = Path(__file__).parents[3]
COMPAT = Path(compat.__file__).parent
OURS = {"_shardwise_patched", "_shardwise_group"}
# Of which shardwise has its own; of others; the dicts of `nn.Module` and operators' schemas, as good as public.
AMBIGUOUS = {
    "_device", "_is_root", "is_sharded", "mp_policy", "offload_to_cpu", "param_dtype", "param_name", "reduce_dtype",
    "_parameters", "_buffers", "_schema",
}  # fmt: skip


def run(change: str, use: str, version: str = "2.16.0") -> subprocess.CompletedProcess[str]:
    """A script of a user on a torch that calls itself `version` and was changed."""
    start = f"import torch\ntorch.__version__ = torch.torch_version.TorchVersion({version!r})\n"
    return subprocess.run(
        [sys.executable, "-W", "always::UserWarning", "-c", start + change + use],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


SHARD = """
import shardwise as sw
mesh = sw.init_distributed(sw.MeshConfig(device="cpu"))
for _ in range(2):
    model = sw.shard(torch.nn.Linear(4, 4), mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
print("sharded", model.weight.grad.full_tensor().sum().item())
torch.distributed.destroy_process_group()
"""

REFUSED = """
import shardwise as sw
from shardwise.fsdp1 import FullyShardedDataParallel
mesh = sw.init_distributed(sw.MeshConfig(device="cpu"))
for use in (lambda m: sw.shard(m, mesh=mesh), FullyShardedDataParallel):
    model = torch.nn.Linear(4, 4)
    try:
        use(model)
    except sw.EnvironmentProblem as error:
        assert type(model.weight) is torch.nn.Parameter
        print(error.exit_code, error)
torch.distributed.destroy_process_group()
"""

# As torch 2.15 did: a method and an attribute of instances are gone, another attribute cannot be set any more.
AS_IN_2_16 = """
import importlib.machinery, importlib.util, pathlib, sys
FSDP2 = "torch.distributed.fsdp._fully_shard."
CHANGES = {
    FSDP2 + "_fsdp_param": ("reset_sharded_param", "another_method"),
    FSDP2 + "_fsdp_param_group": ("self.comm_ctx", "self.another_context"),
}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        text, file = pathlib.Path(found.origin).read_text(), pathlib.Path(FOLDER, name + ".py")
        assert CHANGES[name][0] in text
        file.write_text(text.replace(*CHANGES[name]))
        return importlib.util.spec_from_file_location(name, file)
sys.meta_path.insert(0, Finder())
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
FSDPParam.mp_policy = property(lambda self: None)
"""

WITHOUT_A_FUNCTION = """
import torch.utils._foreach_utils as module
del module._get_fused_kernels_supported_devices
import shardwise as sw
try:
    sw.shard(torch.nn.Linear(4, 4))
except sw.EnvironmentProblem as error:
    print(error)
"""


def test_installed_torch_has_everything_that_is_needed():
    assert list(missing_attributes()) == []


def test_tested_torch_is_taken_without_a_word():
    compat.check_torch()  # warnings are errors here


def test_declared_range_is_the_tested_one():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch{TESTED}" in declared


def test_private_surface_is_what_is_recorded():
    """What `compat` names of torch's private parts is what `NEEDED` lists: a name more or less is a decision."""
    tree = ast.parse("\n".join(file.read_text() for file in COMPAT.glob("*.py") if file.name != "support.py"))
    used = set(attributes(tree)) | set(texts(tree))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert sorted(private - recorded() - own - OURS - {"_getframe"}) == []
    assert sorted(recorded() - own - used) == []


def test_nothing_outside_compat_names_private_torch():
    names = {name for name in recorded() if "_" in name} - AMBIGUOUS
    used = [
        f"{file.relative_to(COMPAT.parent)}: {name}"
        for file in COMPAT.parent.rglob("*.py")
        if file.parent != COMPAT and file.name != "emitted_helpers.py"  # which is code for scripts
        for name in attributes(ast.parse(file.read_text()))
        if name in names
    ]
    assert sorted(used) == []


def recorded() -> set[str]:
    return {name for names in NEEDED.values() for name in re.split(r"[ |=?]+", names) if name}


def attributes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (alias.name for alias in node.names)


def texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_torch_without_a_needed_attribute_is_refused_with_names_and_range(tmp_path: Path):
    result = run(AS_IN_2_16.replace("FOLDER", repr(str(tmp_path))), REFUSED)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.split("3 shardwise")[1:]
    assert first == second, "shard() and the wrapper of FSDP1 say the same"
    assert "does not work with torch 2.16.0, which lacks 3 private attributes" in first
    for name in (
        "_fsdp_param.FSDPParam.mp_policy (read-only)",
        "_fsdp_param.FSDPParam.reset_sharded_param",
        "_fsdp_param_group.FSDPParamGroup.comm_ctx",
    ):
        assert first.count(f"torch.distributed.fsdp._fully_shard.{name}\n") == 1
    assert 'pip install "torch>=2.11,<2.16"' in first


@pytest.mark.slow
def test_name_that_cannot_even_be_imported_is_named():
    result = run("", WITHOUT_A_FUNCTION)
    assert result.returncode == 0, result.stderr
    assert "_foreach_utils._get_fused_kernels_supported_devices" in result.stdout


@pytest.mark.slow
def test_untested_torch_with_everything_in_place_is_warned_about_once():
    result = run("", SHARD, "2.16.0")
    assert result.stdout == "sharded 32.0\n", result.stderr
    assert result.stderr.count("UserWarning: shardwise is tested with torch") == 1, result.stderr
    assert "this is 2.16.0" in result.stderr
