"""Tensor, expert, context and pipeline parallelism: what each does to the modules of a model."""
