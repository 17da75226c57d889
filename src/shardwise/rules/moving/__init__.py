"""Rewriting FSDP1 programs: one file a subject. No torch, nothing is run."""
