"""What a dictionary of FSDP1's or Composer's settings amounts to, and everything there is to say about it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError


@dataclass(slots=True)
class Translation:
    """Filled key by key; nothing is done to the model before all of them have been read."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `ShardConfig`."""
    precision: dict[str, Any] = field(default_factory=dict)
    """Fields of `PrecisionConfig`."""
    precision_reason: str | None = None
    """Why groups compute in their dtype, where a name decided it; in place of the plan's own reason."""
    notes: list[str] = field(default_factory=list)
    """Reasons for the plan: what became of a key whose effect does not show elsewhere."""
    warnings: list[str] = field(default_factory=list)
    """Warnings for the plan: what FSDP1 did and FSDP2 does otherwise."""
    problems: list[str] = field(default_factory=list)
    """`key: what is wrong; what to do`, all of them raised together."""
    mesh: DeviceMesh | None = None
    strategy: str | None = None
    replicate: int | None = None
    shard: int | None = None
    named_precision: str | None = None
    """PURE, DEFAULT or FULL: what it means depends on the trainer's precision, or else on the device."""
    trainer_precision: str | None = None
    buffer_dtype: str | None = None
    sync_from_rank_zero: bool = False
    recompute: bool = False
    """`activation_checkpointing`: of the modules that the model chooses, or else of the blocks."""
    offload_activations: bool = False
    only_children: bool = False
    """Groups are the root's direct children; `fsdp_wrap_fn` and `_fsdp_wrap` of the model are not asked."""
    _said_by: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def put(self, key: str, name: str, value: Any) -> None:
        """Set a field of `ShardConfig` on behalf of `key`; two keys that differ are a problem."""
        earlier, before = self._said_by.get(name, (key, value))
        if before != value:
            self.problem(earlier, f"contradicts {key}: one asks for {before!r}, the other for {value!r}", "give one")
        self._said_by[name] = (key, value)
        self.settings[name] = value

    def note(self, key: str, text: str) -> None:
        """Say in the plan what became of `key`."""
        self.notes.append(f"{key}: {text}")

    def warn(self, key: str, text: str) -> None:
        """Warn in the plan that `key` is not what it was."""
        self.warnings.append(f"{key}: {text}")

    def problem(self, key: str, what: str, fix: str) -> None:
        """Refuse `key`, once all others have been read."""
        self.problems.append(f"{key}: {what}; {fix}")

    def raise_problems(self) -> None:
        """Raise once, with every problem on a line of its own."""
        if self.problems:
            num = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
            raise ConfigError(
                f"{num} in the config of prepare_fully_shard",
                where="\n".join(self.problems),
                why="a setting is carried out, explained or refused, never dropped",
                fix="as each line says",
            )


def as_bool(translation: Translation, key: str, value: Any) -> bool | None:
    """The value if it is a bool; else a problem and None."""
    if isinstance(value, bool):
        return value
    translation.problem(key, f"is {value!r}", "give True or False")
    return None


def member_name(value: Any, members: Iterable[str], numbers_from: int = 1) -> str | None:
    """The name of an enum member given as the member, its name in any case, or its number."""
    names = list(members)
    text = str(getattr(value, "name", value)).strip().upper().rpartition(".")[2]
    if text.isdigit() and not isinstance(value, bool):
        index = int(text) - numbers_from
        return names[index] if 0 <= index < len(names) else None
    return next((name for name in names if name.lstrip("_") == text.lstrip("_")), None)
