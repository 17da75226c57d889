"""Save and load a run's state in any format, on any number of ranks.

These modules contain the public API. `contents.py` describes a checkpoint in any format. Saving collects the run's
objects (`state.py`), copies them (`staging.py`) and writes the sharded format (`formats/sharded.py`). Loading opens any
format (`formats/`; `pickles/` reads torch's files) as chunks of bytes: `loading.py` plans and checks every read,
`names.py` finds the stored name of each tensor, `reading.py` reads. `storage.py` does the I/O.
"""
