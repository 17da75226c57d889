"""Names of parameters: what wrapping adds to them, and how they were before."""

WRAPPED = "_fsdp_wrapped_module"
PREFIX = f"{WRAPPED}."
_RECOMPUTED = "_checkpoint_wrapped_module."


def clean_name(name: str) -> str:
    """A parameter's or buffer's name in the model that was wrapped."""
    return name.replace(PREFIX, "").replace(_RECOMPUTED, "")
