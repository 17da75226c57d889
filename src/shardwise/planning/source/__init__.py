"""Read a model's source: a small interpreter that follows modules, not numbers. `facts.read_calls` is its door."""

from shardwise.planning.source import statements as statements  # fills the table of the syntax nodes that frames read
