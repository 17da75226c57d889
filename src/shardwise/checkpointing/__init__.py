"""Save and load a run's state in any format, on any number of ranks.

These modules are the user's API. `contents.py` describes a checkpoint in any format. A save goes from the run's objects
(`state.py`) through copies of them to the sharded format (`formats/sharded.py`). A load goes from any format
(`formats/`, with `pickles/` for torch's own files) to chunks of bytes: `loading.py` plans and validates every read,
`names.py` finds the stored name of each tensor, `reading.py` reads. `storage.py` does the I/O.
"""
