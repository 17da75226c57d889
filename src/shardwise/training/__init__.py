"""The training loop, and the functions for custom loops."""
