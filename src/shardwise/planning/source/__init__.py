"""Read a model's source: a small interpreter that follows modules, not numbers. `entrypoints.py` is its door."""
