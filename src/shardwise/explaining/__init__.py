"""Known failures with cause and fix, found in an exception, a text or a log. No torch."""

from shardwise.explaining.answer import Explanation, explain

__all__ = ["Explanation", "explain"]
