"""Torch's pickles and zip streams as data: read without executing any code of theirs, written without torch."""
