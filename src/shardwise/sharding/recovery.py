"""Go on after a forward or backward that raised: the lost step is forgotten, the next one works."""

from torch import nn

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.sharding.registry import notes_to_forget


def recover(model: nn.Module) -> None:
    """Make a model usable again after an exception in the middle of a step.

    The step is lost as a whole: parameters are sharded again, what was in flight is waited for and dropped,
    and every gradient of the model is cleared, those of earlier micro-steps included. Parameters and
    optimizer state are as they were.

    Args:
        model: The root that `shard()` or the last `fully_shard` was applied to, or a module that holds such
            roots. On a model that is not sharded it clears the gradients.

    Raises:
        ShardError: `model` is only a part of a sharded model.

    Ranks:
        Local, but the step must have failed at the same place on every rank: a rank that still waits in a
        collective cannot be helped from here.
    """
    states = compat.fsdp_states(model)
    inside = {id(state) for root in states for state in compat.states_under(root)}
    for state in states:
        if compat.is_nested_state(state) and id(state) not in inside:
            raise ShardError(
                "recover was given a part of a sharded model",
                where=type(model).__name__,
                why="what a failed step leaves behind is shared by the whole model",
                fix="call recover(model) with the module that was called to start the step",
            )
    for state in states:
        if not compat.is_nested_state(state):
            compat.reset_iteration(state)
    compat.drop_gradients(model)
    for module in model.modules():
        for forget in notes_to_forget(module):
            forget()
