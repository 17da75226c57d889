"""Find how a model's modules are entered, by reading its source and, given example inputs, by tracing it."""

from typing import Any

from torch import nn

from shardwise.planning.calls import Calls
from shardwise.planning.places import Places, has_forward, has_parameters, is_holder
from shardwise.planning.source import statements
from shardwise.planning.source.entries import public_entries
from shardwise.planning.source.facts import Entry, FactBook
from shardwise.planning.source.summary import summarise
from shardwise.planning.tracing import trace_calls

STATEMENTS_IN = (statements,)
"""Importing it fills the reader's table of statements."""


def find_calls(model: nn.Module, example_inputs: Any = None) -> Calls:
    """Find who calls what in `model`, without hints and without running its code on real data.

    Args:
        model: Any module, on any device; the meta device is enough.
        example_inputs: A tuple of positional arguments, a dict of keyword arguments, or the only argument.
            With it the forward is traced on fake tensors; what the trace saw of the forward then stands.

    Ranks:
        Local. The result is the same on every rank that holds the same model and code.
    """
    if example_inputs is None:
        return read_calls(model)
    traced = trace_calls(model, example_inputs)
    if not traced.complete:
        return read_calls(model).merge(Calls(notes=traced.notes))
    forward, rest = _read(model)
    return traced.merge(forward.without(traced)).merge(rest)


def read_calls(model: nn.Module) -> Calls:
    """Find who calls what by reading the source of the model's classes. Nothing of the model is run."""
    forward, rest = _read(model)
    return forward.merge(rest)


def _read(model: nn.Module) -> tuple[Calls, Calls]:
    """What happens below the root's forward, and what only its other public methods or the script do."""
    places = Places(model)
    book = FactBook(places)
    if has_forward(model):
        book.follow(Entry(model, "forward"))
    num_below_forward = len(book.facts)
    public, notes = public_entries(model, book)
    book.notes += notes
    _assume_the_rest(book, places)
    facts = [fact for fact, _ in book.facts.values()]
    return summarise(book, facts[:num_below_forward]), summarise(book, facts[num_below_forward:], public)


def _assume_the_rest(book: FactBook, places: Places) -> None:
    """Modules that nothing was found to enter: the user's script may call them, so read them as if it did."""
    for name, module in places.modules.items():
        if not name or is_holder(module) or id(module) in places.internal or not has_parameters(module):
            continue
        if not book.is_touched(module):
            book.assume(module)
