"""Carry a plan out, and the tools that a sharded model needs in the loop."""
