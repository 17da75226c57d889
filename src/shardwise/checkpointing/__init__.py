"""Keep it: save and load a run's state in any format, on any number of ranks."""
