"""From files to batches: sources, tokens, samples, their order over all ranks, and the loader."""

from shardwise.training.data.loader import Evaluation, Loader, open_data, open_evaluation

__all__ = ["Evaluation", "Loader", "open_data", "open_evaluation"]
