"""Versions that are known to go wrong with FSDP2: a dated table with sources. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from shardwise.findings import Finding, Severity

CHECKED_ON = "2026-11-15"


@dataclass(frozen=True, slots=True)
class KnownBad:
    """A package in some versions, and what they do."""

    code: str
    package: str
    versions: str
    """As in a requirement: `<2.6`, `==2.12.*`."""
    what: str
    fix: str
    source: str
    backend: str = ""
    """Only where this communication backend is in use."""
    severity: Severity = Severity.WARNING


TABLE = (
    KnownBad(
        "SW611", "torch", "<2.6", "a registered method that forward itself calls makes backward fail",
        "torch 2.6 or later; shardwise.shard enters once on every version",
        "https://github.com/pytorch/pytorch/pull/137922",
    ),
    KnownBad(
        "SW612", "torch", "==2.6.*", "set_model_state_dict(broadcast_from_rank0=True) needs twice the memory",
        "torch 2.7 or later, or shardwise.load_weights", "https://github.com/verl-project/verl/issues/2464",
    ),
    KnownBad(
        "SW613", "torch", "<2.8", "the root ignores reshard_after_forward=True and stays gathered",
        "torch 2.8 or later", "https://github.com/pytorch/pytorch/issues/154655",
    ),
    KnownBad(
        "SW614", "torch", "<2.11", "FSDP2 may sum gradients over gloo instead of averaging them, silently",
        "torch 2.11 or later", "https://github.com/pytorch/pytorch/issues/162338", backend="gloo",
        severity=Severity.ERROR,
    ),
    KnownBad(
        "SW615", "torch", "==2.12.*", "optimizers with foreach=True leak memory on DTensors",
        "torch 2.13, or fused=True", "https://github.com/NVIDIA-NeMo/Automodel/issues/2888",
    ),
    KnownBad(
        "SW616", "torch", "<2.13", "tied weights in two groups silently come apart",
        "torch 2.13, which refuses, or shardwise.shard, which joins the groups",
        "https://github.com/pytorch/pytorch/issues/176076",
    ),
    KnownBad(
        "SW617", "torch", "<2.13", "activation checkpointing with mixed precision recomputes in another dtype",
        "torch 2.13, or wrap blocks before fully_shard; shardwise.checkpoint_activations does",
        "https://github.com/pytorch/pytorch/pull/182580",
    ),
    KnownBad(
        "SW618", "accelerate", ">=1.13,<1.16", "the promised upcast of 16-bit weights to float32 does nothing",
        "cast the model yourself before prepare(): model.float()",
        "https://github.com/huggingface/accelerate/issues/3979",
    ),
    KnownBad(
        "SW619", "accelerate", "<1.16", "without a GPU the FSDP plugin is dropped silently and DDP runs instead",
        "use shardwise on the CPU", "measured with accelerate 1.15.0",
    ),
    KnownBad(
        "SW620", "nccl", "<2.30", "several ranks on one GPU are refused (\"Duplicate GPU detected\")",
        "one rank a GPU, or the gloo backend for tests", "https://github.com/NVIDIA/nccl", severity=Severity.NOTE,
    ),
)  # fmt: skip


def find_known_bad(versions: Mapping[str, str], backend: str) -> list[Finding]:
    """The rows of the table that apply.

    Args:
        versions: Package to version, of those that are installed.
        backend: What the ranks talk with.
    """
    found = []
    for row in TABLE:
        installed = _version(versions.get(row.package, ""))
        if installed is None or (row.backend and row.backend not in backend):
            continue
        if installed in SpecifierSet(row.versions, prereleases=True):
            found.append(
                Finding(
                    code=row.code,
                    message=f"{row.package} {installed}: {row.what} (known on {CHECKED_ON}, {row.source})",
                    where=row.package,
                    severity=row.severity,
                    fix=row.fix,
                )
            )
    return found


def _version(text: str) -> Version | None:
    try:
        return Version(Version(text).public)  # without +cpu
    except InvalidVersion:
        return None
