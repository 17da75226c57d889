"""Integrations with systems that start shardwise; each file needs its own extra."""
