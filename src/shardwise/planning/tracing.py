"""stub."""
from shardwise.planning.calls import Calls
def trace_calls(model, example_inputs) -> Calls:
    return Calls(complete=False)
