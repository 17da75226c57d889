"""Lint rules, one file per subject."""
