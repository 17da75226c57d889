"""Checks of a live model, a file a subject; each yields findings and changes nothing."""
