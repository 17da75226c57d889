"""What scripts reach for inside FSDP1's flat parameters, and why it is not there."""

from torch import nn

from shardwise.errors import ShardError

INTERNALS = {
    "_handle": "the handle of a flat parameter",
    "_handles": "the handles of flat parameters",
    "_all_handles": "the handles of flat parameters",
    "_flat_param": "the flat parameter",
    "flat_param": "the flat parameter",
    "_exec_order_data": "the order in which flat parameters were used",
}


class NoFlatParameter(ShardError, AttributeError):
    """Raised for FSDP1's internals; an AttributeError too, so that `hasattr` and `getattr` with a default work."""


def refuse_internal(name: str) -> NoFlatParameter:
    """The error for reading one of `INTERNALS`."""
    return NoFlatParameter(
        f"there is no {name}",
        where=f"FullyShardedDataParallel.{name}",
        why=f"it is {INTERNALS[name]} in FSDP1; FSDP2 shards every parameter by itself",
        fix="use parameters(), whose to_local() is this rank's shard, or summon_full_params",
    )


class FlatParameter(nn.Parameter):
    """So that `isinstance(parameter, FlatParameter)` can be asked: it never is one."""
