"""Save and load a run's state in any format, on any number of ranks.

The modules here are what a user calls. `contents.py` says what a checkpoint holds, in any format. A save goes from the
run's objects (`state.py`) through copies of them into our format (`formats/sharded.py`). A load, of a run or of weights
alone, goes from any format (`formats/`, with `pickles/` for torch's own files) to chunks of bytes: `loading.py` plans
and proves every read, `names.py` finds the stored name of each tensor, `reading.py` reads. `storage.py` moves bytes.
"""
