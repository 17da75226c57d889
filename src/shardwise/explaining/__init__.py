"""Known failures in exceptions, texts and logs, with cause and fix. No torch."""

from shardwise.explaining.answer import Explanation, explain

__all__ = ["Explanation", "explain"]
