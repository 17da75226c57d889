"""Torch's pickles and zip streams as data: read without running any of it, written without torch."""
