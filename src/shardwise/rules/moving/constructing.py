"""The constructor calls of a file, one by one: each is rewritten as a whole, or not at all."""

from __future__ import annotations

from shardwise.errors import SourceError
from shardwise.rules.moving import constructors, writing
from shardwise.rules.moving.class_values import rewrite_chosen_class
from shardwise.rules.moving.constructors import Blocked
from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.edits import apply_edits
from shardwise.rules.moving.leftovers import built_subclasses
from shardwise.rules.moving.optimizer_order import refuse_early_optimizers
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.refusals import refuse_local_names, refuse_surroundings


def rewrite_constructors(draft: Draft, program: Program) -> None:
    """Rewrite every constructor call of a file that can be, and note why the others cannot."""
    inherited = built_subclasses(draft.context, program)
    for call, is_partial in constructors.find(draft.context, program):
        earlier = draft.snapshot()
        try:
            if inherited:
                raise Blocked(f"the file also builds {inherited[0]}, a subclass of FSDP", "move both together")
            if not is_partial and not constructors.is_certain(draft.context, program, call.func):
                rewrite_chosen_class(draft, program, call)
                continue
            wrap = constructors.read(draft, call, is_partial)
            refuse_surroundings(wrap)
            refuse_early_optimizers(draft, wrap)
            writing.rewrite(wrap, program)
            refuse_local_names(wrap)
            apply_edits(draft.context.text, draft.edits)
        except Blocked as blocked:
            draft.restore(earlier)
            constructors.leave(draft, call, blocked)
        except SourceError:
            draft.restore(earlier)
            constructors.leave(draft, call, Blocked("another rewrite touches the same lines", "rewrite it by hand"))
