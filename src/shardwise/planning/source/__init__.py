"""Read a model's source: a small interpreter that follows modules, not numbers. `facts.read_calls` is its door."""
