"""Lint: find what FSDP2 scripts do wrong; never imports torch."""
