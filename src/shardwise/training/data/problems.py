"""Collecting what is wrong with the data, to say it all at once."""

from __future__ import annotations

from shardwise.errors import ConfigError

_NUM_SHOWN = 10


class Problems:
    """Places where one rule is broken; raises once, with all of them.

    Args:
        what: The sentence for them all; `{num}` stands for how many there are.
        why: The rule.
        fix: What to do.
    """

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        self._what, self._why, self._fix = what, why, fix
        self._shown: list[str] = []
        self._num = 0

    @property
    def wanted(self) -> bool:
        """Whether the next place would be shown; finding it can be slow."""
        return self._num < _NUM_SHOWN

    def add(self, place: str) -> None:
        """Note one more; only the first few are kept."""
        if self.wanted:
            self._shown.append(place)
        self._num += 1

    def raise_any(self) -> None:
        """Raise if anything was added.

        Raises:
            ConfigError: With the first places and the number of all.
        """
        if not self._num:
            return
        more = [f"... and {self._num - _NUM_SHOWN} more"] if self._num > _NUM_SHOWN else []
        where = "\n".join(self._shown + more)
        raise ConfigError(self._what.format(num=self._num), where=where, why=self._why, fix=self._fix)
