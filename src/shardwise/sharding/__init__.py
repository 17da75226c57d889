"""Apply a plan, and the functions that a sharded model needs in the loop."""
