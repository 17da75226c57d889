"""Keep it: save and load a run's state in any format, on any number of ranks.

The files here are what a user calls; `contents.py` is what they all speak of. A save goes from the run's objects
(`state/`) through copies of them (`saving/`) into our format (`sharded/`). A load goes from any format (`formats/`,
with `pickles/`, `flat/` and `hugging_face/` for what is special about them) to boxes of bytes, and through `reading/`
into the objects that `loading/` has matched. `storage/` moves the bytes, `agreeing/` makes the ranks fail alike.
"""
