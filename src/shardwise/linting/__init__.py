"""Lint: find mistakes in FSDP2 scripts; never imports torch."""
