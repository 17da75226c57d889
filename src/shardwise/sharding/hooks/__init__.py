"""Hooks of a sharded model: around forward, backward, writes to parameters and collectives."""
