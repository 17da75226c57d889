"""FSDP1's wrapping policies, `enable_wrap` and `wrap`: torch's own, those that scripts take by a private name too."""

from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from shardwise import compat

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

_or_policy = compat.private_policy("_or_policy")
_module_wrap_policy = compat.private_policy("_module_wrap_policy")
_Policy = compat.private_policy("_Policy")
