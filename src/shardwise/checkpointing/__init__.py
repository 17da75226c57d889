"""Save and load a run's state in any format, on any number of ranks.

The modules here are what a user calls. `contents.py` says what a checkpoint holds, in any format. A save goes from the
run's objects (`state/`) through copies of them into our format (`formats/sharded.py`). A load goes from any format
(`formats/`, with `pickles/` for torch's own files) to chunks of bytes, and through `reading.py` into the tensors that
`loading.py` and `matching.py` have matched. `storage/` moves the bytes.
"""
