"""Choose the dimension each parameter is split along."""

WORTHWHILE_PADDING = 1 / 8
"""Below this share of padding, dim 0 stays: its shards are contiguous in checkpoints."""


def choose_shard_dim(shape: tuple[int, ...], num_shards: int) -> tuple[int, str]:
    """The dimension to split, and why when it is not the first.

    FSDP2 pads dim 0 to a multiple of the ranks but splits other dimensions only evenly. A stack of 8 experts on 64
    ranks would be padded eightfold on dim 0.
    """
    if not shape or num_shards <= 1 or shape[0] == 0:
        return 0, ""
    rows = shape[0]
    padded = -(-rows // num_shards) * num_shards
    if (padded - rows) / rows <= WORTHWHILE_PADDING:
        return 0, ""
    even = [dim for dim in range(1, len(shape)) if shape[dim] and shape[dim] % num_shards == 0]
    if not even:
        return 0, ""
    dim = even[0]
    return dim, (
        f"split on dim {dim} ({shape[dim]} / {num_shards}): dim 0 has {rows} rows, "
        f"padding would cost {padded / rows:.1f}x the memory"
    )
