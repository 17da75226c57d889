"""Autograd nodes of each call of a group, so that backward unshards the group on any path through the graph.

FSDP2 unshards a group when the gradient of one of its outputs arrives. If a tensor leaves a call in another way (on an
attribute, in a cache or a closure), backward bypasses the outputs and uses freed parameters. Here each call is recorded
as a range of autograd sequence numbers. Before a backward runs, the nodes of the loss are followed to the calls. If all
calls are reached at their outputs, and all calls inside them have their last node in the graph, nothing is to be done,
because autograd runs nodes in reverse order of their numbers. Otherwise the whole graph is traversed once, and each
node where backward enters a call gets the pre-backward hook of its outputs.
"""

import bisect
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.sharding.hooks.outside import WholeValue, end_outside_use
from shardwise.sharding.hooks.parameter_writes import is_of_group
from shardwise.sharding.inventory import class_name

_MOST_CALLS = 2**18
_MOST_FINISHED_CALLS = 2**12


class GroupCall:
    """One forward of a group, as the half-open range of its nodes' sequence numbers."""

    __slots__ = ("inner", "is_pending", "module", "outputs", "parent", "since", "until")

    def __init__(self, module: nn.Module, parent: "GroupCall | None") -> None:
        self.module, self.parent = weakref.ref(module), parent
        self.since, self.until = compat.sequence_number(), -1  # an open call has no nodes: its group is unsharded
        self.outputs: tuple[int, ...] = ()
        self.is_pending = True  # no backward has run since
        # For a running outermost call: the first number of each call inside it, and its last node if that has the
        # pre-backward hook, else None.
        self.inner: list[tuple[int, Any]] = []

    def unshard(self, *_: Any) -> None:
        """Unshard the group as FSDP2 does when backward reaches it."""
        if (module := self.module()) is not None:
            compat.pre_backward(module)


class RecordedBackward:
    """A backward with `create_graph=True`, as for a gradient penalty.

    Its nodes save parameters for a second backward, which does not enter calls. The groups stay unsharded until the end
    of the second backward, which then reduces their gradients.
    """

    def __init__(self, calls: Iterable[GroupCall]) -> None:
        self.calls = list({call.module: call for call in calls if call.module() is not None}.values())
        self._groups = [g for call in self.calls if (m := call.module()) is not None for g in compat.groups_of(m)]
        self.since, self.until = compat.sequence_number(), -1
        self.keep_unsharded()

    def keep_unsharded(self) -> None:
        """Keep the groups unsharded until `reshard`; again for each second backward over a retained graph."""
        self._restore = compat.keep_unsharded(self._groups)

    def close(self) -> None:
        """Record the last node after the backward."""
        if self.until < 0:
            self.until = compat.sequence_number()

    def made(self, node: Any) -> bool:
        """Whether a node belongs to the recorded graph."""
        return self.since <= compat.sequence_number_of(node) < self.until

    def reshard(self) -> None:
        """Reshard the groups after the second backward."""
        self._restore()
        for group in self._groups:
            if compat.is_unsharded(group):
                compat.reshard_group(group)


class GraphCalls:
    """The calls of one thread; autograd numbers nodes per thread."""

    def __init__(self) -> None:
        self.calls: list[GroupCall] = []  # sorted by `since`, outer calls before inner ones
        self._open: list[GroupCall] = []
        self._roots: Sequence[Any] = ()
        self._is_followed = False
        self._recorded: list[RecordedBackward] = []
        self._ends_recorded = self._retains = False

    def enter(self, module: nn.Module) -> GroupCall | None:
        """Begin a call; return None if it records no nodes for a later backward."""
        if not torch.is_grad_enabled() or compat.in_backward():
            return None
        if not self._open:
            del self.calls[:-_MOST_CALLS]
        call = GroupCall(module, self._open[-1] if self._open else None)
        self._open.append(call)
        self.calls.append(call)
        return call

    def close(self, call: GroupCall | None, hooked: Iterable[Any]) -> None:
        """End a call; `hooked` are the nodes with the group's pre-backward hook."""
        if call is None or call not in self._open:
            return
        outermost = self._open[0]
        del self._open[self._open.index(call) :]
        call.until = compat.sequence_number()
        nodes = {compat.sequence_number_of(node): node for node in hooked}
        call.outputs = tuple(number for number in nodes if number >= call.since)
        if call is not outermost:
            outermost.inner.append((call.since, nodes.get(call.until - 1)))
            return
        inner, call.inner = call.inner, []
        for number in call.outputs if inner else ():
            # Only nodes below this one, to avoid a reference cycle.
            below = [node for since, node in inner if since < number]
            below = [None if node is None or compat.sequence_number_of(node) > number else node for node in below]
            if nodes[number] in below:
                below.remove(nodes[number])
            nodes[number].register_prehook(functools.partial(self._check, below))

    def abandon(self, call: GroupCall | None) -> None:
        """End a call that raised; its results are freed."""
        if call in self._open:
            call.inner.clear()
            del self._open[self._open.index(call) :]

    def before_backward(
        self, outputs: Sequence[Any], inputs: Sequence[Any], create_graph: bool, accumulates: bool, retains: bool
    ) -> bool:
        """Prepare for a backward from `outputs`; return whether to call `after_backward`.

        Raises:
            ShardError: The backward requests gradients of sharded parameters, or it accumulates gradients of a sharded
                model either inside a forward or with `create_graph`.
        """
        if not self.calls:
            return False
        self._roots = [edge.grad_fn if isinstance(edge, torch.Tensor) else edge.node for edge in outputs]
        if self._open and accumulates:
            raise _refused(
                "backward() inside the forward of a sharded model",
                self._open,
                why="backward ends by resharding the model, which the forward still needs",
                fix="return the losses, and call backward() on their sum after the forward; in it, "
                "torch.autograd.grad(loss, activations) works",
            )
        if any(isinstance(each, torch.Tensor) and is_of_group(each) for each in inputs) and (met := self._calls_met()):
            raise _refused(
                "gradients with respect to parameters of a sharded model",
                met,
                why="backward computes gradients of unsharded parameters, which exist for its time only, and reduces "
                "them into the `.grad` of the sharded ones",
                fix="loss.backward(), then parameter.grad; by inputs or activations torch.autograd.grad works",
            )
        if any(isinstance(output, DTensor) for output in outputs):
            self._convert_plain_gradients()
        self._is_followed = False
        if not self._arrives_at_outputs():
            self._follow()
        if create_graph:
            if (met := self._calls_met()) and accumulates:
                raise _refused(
                    "backward(create_graph=True) of a sharded model",
                    met,
                    why="gradients are reduced over the ranks into shards, which leaves no graph to differentiate "
                    "again",
                    fix="differentiate by inputs or activations, torch.autograd.grad(output, inputs, "
                    "create_graph=True), and call backward() of the loss that uses the result",
                )
            self._recorded.append(RecordedBackward(met))
        elif self._recorded and any(recorded.made(node) for node in self._nodes() for recorded in self._recorded):
            self._ends_recorded, self._retains = True, retains
            for recorded in self._recorded:
                recorded.keep_unsharded()
            calls = {call.module: call for recorded in self._recorded for call in recorded.calls}
            for node in filter(None, self._roots):
                for call in calls.values():
                    node.register_prehook(call.unshard)
        return True

    def after_backward(self) -> None:
        """Drop the oldest calls, which only earlier backwards could reach."""
        self._roots = ()
        for recorded in self._recorded:
            recorded.close()
            if self._ends_recorded:
                recorded.reshard()
        if self._ends_recorded:
            self._recorded, self._ends_recorded = self._recorded if self._retains else [], False
        for call in self.calls:
            call.is_pending = False
        del self.calls[:-_MOST_FINISHED_CALLS]

    def _check(self, last_nodes: Sequence[Any], *_: Any) -> None:
        """Check, when backward enters a call, that it will run the last nodes of the calls inside it."""
        if self._roots and not all(node is not None and compat.will_run(node) for node in last_nodes):
            self._follow()

    def _arrives_at_outputs(self) -> bool:
        """Whether backward reaches outermost calls only at their outputs, and reaches all pending ones."""
        outermost = [call for call in self.calls if call.parent is None]
        starts = [call.since for call in outermost]
        arrived: set[GroupCall] = set()
        seen, todo = set(), [node for node in self._roots if node is not None]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            number = compat.sequence_number_of(node)
            position = bisect.bisect_right(starts, number) - 1
            if position >= 0 and number < (call := outermost[position]).until:
                if number not in call.outputs:
                    return False
                arrived.add(call)
            else:
                todo += [node for node, _ in node.next_functions if node is not None]
        return all(call in arrived for call in outermost if call.is_pending)

    def _nodes(self) -> Iterable[Any]:
        """Return the nodes that this backward may run, in the same order on all ranks."""
        seen: dict[Any, None] = {}
        todo = [node for node in self._roots if node is not None]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen[node] = None
                todo += [child for child, _ in node.next_functions if child is not None]
        return seen

    def _convert_plain_gradients(self) -> None:
        """Give the model's outputs plain gradients if a term over sharded parameters makes the loss a DTensor.

        The result of an operation is a DTensor if an operand is; outputs of calls are plain.
        """
        groups = [
            group for call in self.calls if (module := call.module()) is not None for group in compat.groups_of(module)
        ]
        spread: dict[Any, bool] = {}
        todo = [node for node in self._roots if node is not None]
        while todo:
            node = todo[-1]
            children = (
                [] if self._is_in_call(node) else [child for child, _ in node.next_functions if child is not None]
            )
            if missing := [child for child in children if child not in spread]:
                todo += missing
                continue
            todo.pop()
            if hasattr(node, "variable"):
                spread[node] = isinstance(node.variable, DTensor)
                if spread[node]:  # its gradient may be in a pending reduction
                    node.register_prehook(lambda _: compat.wait_for_reduced_gradients(groups))
            elif node not in spread:
                plain = [child for child in children if not spread[child]]
                spread[node] = len(plain) < len(children) and not isinstance(node, WholeValue._backward_cls)
                if spread[node] and plain and node.name() not in _ADDS:
                    raise ShardError(
                        f"a term over sharded parameters was combined with what the model returned ({node.name()})",
                        where="the loss",
                        why="the term was computed before the forward, as a DTensor: it can be added to a loss, but in "
                        "a product this rank's value counts for all ranks",
                        fix="compute the term after the forward, or in it",
                    )
                for child in plain if spread[node] else ():
                    child.register_prehook(_plain_gradients)

    def _calls_before(self, number: int) -> Iterator[GroupCall]:
        """Yield the last call begun before a node was recorded, and the calls around it, innermost first."""
        position = bisect.bisect_right(self.calls, number, key=lambda call: call.since) - 1
        call = self.calls[position] if position >= 0 else None
        while call is not None:
            yield call
            call = call.parent

    def _is_in_call(self, node: Any) -> bool:
        """Whether a call recorded the node."""
        number = compat.sequence_number_of(node)
        return any(number < call.until for call in self._calls_before(number))

    def _calls_met(self) -> list[GroupCall]:
        """Return the calls that recorded nodes of this backward, and the calls around them."""
        numbers = map(compat.sequence_number_of, self._nodes())
        met = ((number, call) for number in numbers for call in self._calls_before(number))
        return list(dict.fromkeys(call for number, call in met if number < call.until or call in self._open))

    def _follow(self) -> None:
        """Hook all nodes where this backward enters a call, except outputs, which have the hook."""
        if self._is_followed:
            return
        self._is_followed = True
        hooked: set[tuple[Any, GroupCall]] = set()
        seen, todo = set(), [(node, -1) for node in self._roots if node is not None]
        while todo:
            node, consumer = todo.pop()
            number = compat.sequence_number_of(node)
            for call in self._calls_before(number):
                if call.since <= consumer < call.until:
                    break
                if number < call.until and number not in call.outputs and (node, call) not in hooked:
                    hooked.add((node, call))
                    node.register_prehook(call.unshard)
            if node not in seen:
                seen.add(node)
                todo += [(child, number) for child, _ in node.next_functions if child is not None]


_ADDS = ("AddBackward0", "SubBackward0", "RsubBackward1", "StackBackward0", "CatBackward0")


def _plain_gradients(gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Return gradients as full tensors. Collective if one is sharded."""
    return tuple(each.full_tensor() if isinstance(each, DTensor) else each for each in gradients)


def _refused(what: str, calls: Iterable[GroupCall], *, why: str, fix: str) -> ShardError:
    modules = (module for call in calls if (module := call.module()) is not None)
    return ShardError(what, where=next(map(class_name, modules), ""), why=why, fix=fix)


_OF_THREAD = threading.local()


def graph_calls() -> GraphCalls:
    """Return the calls of this thread."""
    if not hasattr(_OF_THREAD, "calls"):
        _OF_THREAD.calls = GraphCalls()
    return _OF_THREAD.calls


@functools.cache
def watch_backward() -> None:
    """Call `before_backward` and `after_backward` around every backward of this process."""
    ended: list[Callable[[], None]] = []
    is_followed = False

    def before(outputs: Sequence[Any], inputs: Sequence[Any], *flags: bool) -> bool:
        nonlocal is_followed
        if compat.in_backward():
            return False
        ended[:] = end_outside_use()
        is_followed = graph_calls().before_backward(outputs, inputs, *flags)
        return is_followed or bool(ended)

    def after() -> None:
        if is_followed:
            graph_calls().after_backward()
        while ended:
            ended.pop()()

    compat.watch_backward(before, after)
