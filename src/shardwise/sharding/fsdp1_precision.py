"""Mixed precision as FSDP1 and Composer spell it: names, dictionaries and torch's own policy objects."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardwise.sharding.translation import Translation

NAMED = ("PURE", "DEFAULT", "FULL")

_DTYPES = {
    "float64": ("float64", "fp64", "double"),
    "float32": ("float32", "fp32", "float", "full"),
    "bfloat16": ("bfloat16", "bf16", "bfp16", "amp_bf16"),
    "float16": ("float16", "fp16", "half", "amp", "amp_fp16"),
}
_DTYPE_OF = {spelling: dtype for dtype, spellings in _DTYPES.items() for spelling in spellings}
_CASTS = ("cast_forward_inputs", "cast_root_forward_inputs")
_DTYPE_KEYS = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")


def dtype_of(value: Any) -> str | None:
    """`bfloat16` for `torch.bfloat16`, "bf16", "amp_bf16" and the like; None for what is no such dtype."""
    return _DTYPE_OF.get(str(getattr(value, "value", value)).lower().removeprefix("torch."))


def read_mixed_precision(translation: Translation, key: str, value: Any) -> None:
    """`mixed_precision=`: one of Composer's names, a dictionary, or an object of FSDP1 or FSDP2."""
    if value is None:
        return
    if isinstance(value, str) and value.upper() in NAMED:
        translation.named_precision = value.upper()
        return
    given = fields_of(value)
    if given is None:
        fix = 'give "PURE", "DEFAULT", "FULL" or {"param_dtype": "bf16", "reduce_dtype": "fp32"}'
        translation.problem(key, f"is {value!r}", fix)
        return
    translation.precision |= read_fields(translation, key, given)
    if (buffers := given.get("buffer_dtype")) is not None:
        translation.buffer_dtype = dtype_of(buffers)


def fields_of(value: Any) -> dict[str, Any] | None:
    """A dictionary, or the attributes of a dataclass, by name."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return fields | getattr(value, "__dict__", {})  # Composer's constructor sets any attribute
    return None


def read_fields(translation: Translation, key: str, given: dict[str, Any]) -> dict[str, Any]:
    """A precision dictionary as fields of `PrecisionConfig`; None and absent mean what they mean to FSDP."""
    known = (*_DTYPE_KEYS, *_CASTS, "keep_low_precision_grads", "_module_classes_to_ignore")
    dtypes: dict[str, str | None] = {}
    for name, value in given.items():
        if name not in known:
            translation.problem(
                f"{key}.{name}", "is no setting of mixed precision", f"choose among {', '.join(known[:6])}"
            )
        elif name in _DTYPE_KEYS and value is not None:
            dtypes[name] = dtype_of(value)
            if dtypes[name] is None:
                translation.problem(
                    f"{key}.{name}", f"is {value!r}", "give a torch dtype, or a name such as bf16 or fp32"
                )
    if given.get("keep_low_precision_grads"):
        explain_low_precision_grads(translation, f"{key}.keep_low_precision_grads", True)
    if given.get("_module_classes_to_ignore"):
        names = ", ".join(sorted(kind.__name__ for kind in given["_module_classes_to_ignore"]))
        translation.note(key, f"{names}: FSDP1 kept such modules out of low precision; name them in overrides for that")
    return _fields(translation, key, dtypes, given)


def _fields(translation: Translation, key: str, dtypes: dict[str, str | None], given: dict[str, Any]) -> dict[str, Any]:
    param = dtypes.get("param_dtype")
    fields: dict[str, Any] = {"param_dtype": param or "storage"}
    if (reduce := dtypes.get("reduce_dtype") or param) is not None:
        fields["reduce_dtype"] = reduce
        if dtypes.get("reduce_dtype") is None and reduce in ("bfloat16", "float16"):
            translation.note(key, f"gradients are summed in {reduce}, the param_dtype, as no reduce_dtype is given")
    if (output := dtypes.get("output_dtype")) is not None:
        fields["output_dtype"] = output
    casts = [given.get(name) for name in _CASTS]
    if any(cast is not None for cast in casts):
        fields["cast_inputs"] = any(casts)
    if casts[0] is False and casts[1]:
        translation.note(
            key, "inputs are cast at every group, not only at the root; where dtypes agree it costs nothing"
        )
    return fields


def explain_low_precision_grads(translation: Translation, key: str, value: Any) -> None:
    """`keep_low_precision_grads`: FSDP2 has no such switch."""
    if value:
        why = "gradients have the dtype parameters are stored in; store those in 16 bits to keep them there"
        translation.warn(key, why)
    else:
        translation.note(key, "as always: gradients have the dtype parameters are stored in")


def resolve_named(translation: Translation, compute_dtype: str | None) -> None:
    """Turn PURE, DEFAULT or FULL into dtypes.

    Args:
        translation: With the name, and the trainer's precision if it was given.
        compute_dtype: What this device computes in when nobody says; None is the dtype of storage.
    """
    name, trainer = translation.named_precision, translation.trainer_precision
    if name is None and trainer is None:
        return
    if translation.precision:
        translation.problem("precision", "is given twice: by name and by dtypes", "keep one")
        return
    name = name or "DEFAULT"
    dtype = None if name == "FULL" else trainer or compute_dtype
    translation.precision["param_dtype"] = dtype or "storage"
    if name == "PURE" and dtype is not None:
        translation.precision["reduce_dtype"] = dtype
    if name == "FULL":
        text = "computes as stored; gradients are summed in 32 bits or more"
    else:
        whose = "the trainer's precision" if trainer else "this device's own choice"
        sums = dtype if name == "PURE" and dtype else "float32"
        text = f"computes in {dtype or 'the stored dtype'}, {whose}; sums gradients in {sums}"
    translation.precision_reason = f"mixed_precision: {name}: {text}"
