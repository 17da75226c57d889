"""Say once per process what FSDP1 did and FSDP2 does otherwise."""

import warnings

_SAID: set[str] = set()


def warn_once(about: str, text: str) -> None:
    """Warn, unless this was said before.

    Args:
        about: The argument or call, as the script spells it.
        text: What is different, and what to do about it.

    Ranks:
        Local.
    """
    if about not in _SAID:
        _SAID.add(about)
        warnings.warn(f"shardwise.fsdp1: {about}: {text}", UserWarning, stacklevel=4)
