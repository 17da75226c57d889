"""Tiny models of many families, each with its batches and its loss: what sharding must not change."""

from tests.zoo.case import Case

__all__ = ["Case", "cases", "find"]

_FAMILIES = {
    "transformers": (
        "text",
        "encoders",
        "vision",
        "audio",
        "multimodal",
        "text_extra",
        "vision_extra",
        "multimodal_extra",
    ),
    "diffusers": ("diffusion",),
    "hard_cases": (
        "reference",
        "joint_attention",
        "dispatcher",
        "mixed_dtypes",
        "containers",
        "experts",
        "tied",
        "odd_parameters",
        "torch_modules",
        "outputs",
        "calls",
    ),
}


def cases(kind: str) -> dict[str, Case]:
    """Every case of one kind (`transformers`, `diffusers`, `hard_cases`) by name."""
    from importlib import import_module

    found = [case for family in _FAMILIES[kind] for case in import_module(f"tests.zoo.{family}").CASES]
    assert len({case.name for case in found}) == len(found), "two cases share a name"
    return {case.name: case for case in found}


def find(name: str) -> Case:
    """The case called `name`, whatever its kind."""
    return next(found[name] for kind in _FAMILIES if name in (found := cases(kind)))
