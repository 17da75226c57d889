"""explained(): errors in forward, backward and step leave with their cause and fix."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardwise.sharding.notes import annotate


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Add a note to any error that leaves the block: module, group, caller's line, cause and fix.

    The error keeps its type and its traceback. Errors in the forward of a model that `shard` sharded carry the note
    anyhow; around `loss.backward()` and `optimizer.step()` this is what adds it.

    Args:
        model: Sharded by shardwise or by hand.

    Ranks:
        Local.
    """
    try:
        yield
    except BaseException as error:  # DCP's CheckpointException is no Exception
        annotate(error, model)
        raise
