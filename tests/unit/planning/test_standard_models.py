"""read_calls and trace_calls against real runs of published architectures, watched by our own hooks."""

import warnings
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.planning.calls import Calls
from shardwise.planning.planner import read_calls
from shardwise.planning.tracing import trace_calls
from tests.unit.planning.standard_models import MODELS

# Code that the run does not take, since a flag among the arguments is off; it would read these if it were on.
READ_WHEN_ASKED = {
    "clip": {"vision_model.embeddings.position_embedding.weight"},
    "llava": {"model.vision_tower.embeddings.position_embedding.weight"},
}
CALLED_BY_NAME = {"t5": {"shared"}, "bart": {"model.shared"}}  # tied to the embeddings that are called


@dataclass
class Run:
    """What a real forward does, module by module."""

    called: dict[str, int] = field(default_factory=dict)
    bypassed: set[tuple[str, str]] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)


class Watcher(TorchDispatchMode):
    """Hooks on every module; a parameter used while its owner is not entered is a foreign read."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.run, self.stack = Run(), []
        self.names = {id(module): name for name, module in reversed(list(model.named_modules()))}
        self.modules = dict(model.named_modules())
        self.inside = {
            id(module)
            for name, module in self.modules.items()
            if any(isinstance(self.modules[above], nn.MultiheadAttention) for above in self.around(name))
            or "parametrizations" in name
        }
        self.owners = defaultdict(set)
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.owners[id(parameter)].add(id(module))
        self.parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            module.register_forward_pre_hook(self.enter)
            module.register_forward_hook(lambda *_: self.stack.pop() and None)

    @staticmethod
    def around(name: str) -> list[str]:
        parts = name.split(".") if name else []
        return [".".join(parts[:i]) for i in range(len(parts))]

    def enter(self, module, args):
        name = self.names[id(module)]
        if id(module) not in self.inside:
            self.run.called[name] = self.run.called.get(name, 0) + 1
            covered = {above for entered in self.stack for above in (*self.around(entered), entered)}
            for above in self.around(name) if self.stack else ():
                callable_ = type(self.modules[above]).forward is not nn.Module.forward
                if above not in covered and callable_:
                    self.run.bypassed.add((above, name))
        self.stack.append(name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        entered = {id(self.modules[name]) for name in self.stack}
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs or {})):
            owners = self.owners.get(id(tensor), set()) - self.inside
            if owners and not owners & entered and not func.overloadpacket.__name__.endswith("_like"):
                self.run.reads.add(self.parameter_names[id(tensor)])
        return func(*args, **(kwargs or {}))


def flat(table) -> set[tuple[str, str]]:
    return {(name, inner) for name, many in table.items() for inner in many}


def agrees(calls: Calls, run: Run, model: nn.Module) -> None:
    """A complete trace sees exactly what really happened."""
    assert calls.called == set(run.called)
    assert flat(calls.bypassed) == run.bypassed
    assert set(calls.foreign_reads) == run.reads
    modules = dict(model.named_modules())
    assert calls.repeated == {n for n, c in run.called.items() if c > 1 and any(True for _ in modules[n].parameters())}


@pytest.mark.parametrize("name", MODELS)
def test_reading_and_tracing_agree_with_a_real_run(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = MODELS[name]()
        model.train()
        read = read_calls(model)
        traced = trace_calls(model, inputs)
        watcher = Watcher(model)
        with watcher:
            model(**inputs)
    run = watcher.run
    assert not read.unreadable
    assert set(run.called) <= read.called
    assert flat(read.bypassed) == run.bypassed
    assert set(read.foreign_reads) - READ_WHEN_ASKED.get(name, set()) == run.reads
    assert read.assumed == CALLED_BY_NAME.get(name, set())
    assert not read.conditional
    modules = dict(model.named_modules())
    assert set(read.repeated) == {
        n for n, c in run.called.items() if c > 1 and any(True for _ in modules[n].parameters())
    }
    uncalled = read.called - set(run.called) - read.assumed
    assert not {n for n in uncalled if any(True for _ in modules[n].parameters())}
    if traced.complete:
        agrees(traced, run, model)
