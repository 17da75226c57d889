"""Checks of a live model, a guard against diverging ranks, hangs, and the environment."""
