"""What migrate has to say, by code: the name of each finding and one sentence. `docs/rules` has the pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding."""

    code: str
    name: str
    summary: str


_KINDS = (
    Kind("SW101", "fsdp1-constructor", "FSDP(...) is FSDP1's constructor; FSDP2 shards in place, with fully_shard."),
    Kind("SW102", "fsdp1-class-as-value", "FSDP's class is passed around, subclassed or chosen at run time."),
    Kind("SW103", "fsdp1-enable-wrap", "enable_wrap and wrap build FSDP1 units while the model is being built."),
    Kind("SW110", "fsdp1-state-dict-type", "state_dict_type says how FSDP1 gathers a state dict."),
    Kind("SW111", "plain-state-dict", "state_dict() of a sharded model holds shards under FSDP2, not whole tensors."),
    Kind("SW112", "fsdp1-optimizer-state", "FSDP1 has calls of its own for the state of an optimizer."),
    Kind("SW113", "fsdp1-local-state-dict", "LOCAL_STATE_DICT holds flat shards, which FSDP2 does not have."),
    Kind("SW120", "fsdp1-clip-grad-norm", "clip_grad_norm_ is a method of FSDP1's models only."),
    Kind("SW121", "fsdp1-no-sync", "no_sync is a context of FSDP1's models; FSDP2 has a switch."),
    Kind("SW122", "sharded-grad-scaler", "ShardedGradScaler is FSDP1's; FSDP2 works with torch's own."),
    Kind("SW123", "fsdp1-type-check", "isinstance and annotations name FSDP1's class."),
    Kind("SW124", "summon-full-params", "summon_full_params gathers FSDP1's flat parameters."),
    Kind("SW125", "recomputation-after-sharding", "Activation checkpointing must be applied before fully_shard."),
    Kind("SW126", "fsdp1-inner-module", "`.module` reaches into FSDP1's wrapper; FSDP2 has none."),
    Kind("SW127", "flat-parameter", "FSDP1's flat parameters and handles do not exist in FSDP2."),
    Kind("SW128", "optimizer-before-sharding", "An optimizer built before fully_shard updates tensors nobody uses."),
    Kind("SW129", "offload-needs-gloo", "Offloaded gradients are on the CPU, where NCCL cannot reduce them."),
    Kind("SW130", "fsdp1-communication-hook", "register_comm_hook has no direct counterpart in FSDP2."),
    Kind("SW131", "fsdp1-static-call", "A function of FSDP1's class that works on FSDP1's models only."),
    Kind("SW132", "made-for-fsdp1", "A function that may know FSDP1's models only is handed the sharded model."),
    Kind("SW133", "wrapped-elsewhere", "No file given wraps a model: the one that does must move to FSDP2 as well."),
    Kind("SW134", "ranks-drawn-apart", "Ranks draw different weights, and each keeps its part of its own."),
    Kind("SW135", "whole-numbers", "Sizes and norms of sharded parameters are of the whole, not of a rank's part."),
    Kind("SW136", "forward-by-name", "FSDP2 gathers parameters when a module is called, not when its forward is."),
    Kind("SW180", "unreadable-source", "The file cannot be read as Python, so nothing in it is rewritten."),
)
KINDS = {kind.code: kind for kind in _KINDS}
