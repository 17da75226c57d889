"""Analyze a model's source: a small interpreter that tracks modules, not numbers. Entry point: `facts.read_calls`."""

from shardwise.planning.source import statements as statements  # registers the handlers of syntax nodes
