"""Tensor, expert, context and pipeline parallelism of a model's modules."""
