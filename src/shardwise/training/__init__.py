"""Run it: the loop, and the functions that a loop of your own calls."""
