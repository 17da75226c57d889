"""Hooks of a sharded model: around forwards, backwards, writes to parameters and collectives."""
