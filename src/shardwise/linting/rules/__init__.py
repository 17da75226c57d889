"""Lint rules, one file a subject."""
