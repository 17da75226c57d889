"""Watch one forward of a model on fake tensors: who calls what, and who reads whose parameters."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.compat import fake_tensor_mode, watch_operators
from shardwise.planning.calls import Calls
from shardwise.planning.places import Places, has_forward
from shardwise.planning.tracing_frames import failing_module, running_methods
from shardwise.planning.tracing_state import preserved

_SHAPE_ONLY = (
    "new_",
    "sym_",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "device",
)


def trace_calls(model: nn.Module, example_inputs: Any) -> Calls:
    """Run `model` once on fake tensors and report how its modules were entered.

    Nothing is computed and nothing of the model changes: parameters, buffers, hooks, attributes, training
    mode and random state are as before, also after an error.

    Args:
        model: On any device; meta parameters are taken to live where the inputs do.
        example_inputs: A tuple of positional arguments, a dict of keyword arguments, or the only argument.

    Returns:
        The facts of this one run. `complete` is False when the forward could not be run to its end on fake
        tensors (it looks at the data, say); `notes` then says why.

    Ranks:
        Local.
    """
    places = Places(model)
    watch = _Watch(places)
    if not has_forward(model):
        return Calls(complete=False, notes=(f"tracing: {type(model).__name__} has no forward",))
    args, kwargs = _split(example_inputs)
    try:
        with fake_tensor_mode() as mode, preserved(model), faked(model, (args, kwargs), mode) as fakes:
            watch.parameters = fakes.originals
            args, kwargs = fakes.inputs
            with watch.hooked(), torch.enable_grad():
                model(*args, **kwargs)
    except Exception as error:  # the model's own code runs here and may raise anything
        where = failing_module(error, places) or "the root"
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return dataclasses.replace(watch.calls(), complete=False, notes=(f"tracing stopped in {where}: {why}",))
    return watch.calls()


def _split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, tuple) and not hasattr(example_inputs, "_fields"):
        return example_inputs, {}
    if type(example_inputs) is dict:
        return (), example_inputs
    return (example_inputs,), {}


class _Watch:
    """What is seen during the run."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.parameters: dict[int, nn.Parameter] = {}
        self.entered: list[nn.Module] = []
        self.counts: dict[str, int] = {}
        self.methods: dict[str, set[str]] = defaultdict(set)
        self.bypassed: dict[str, set[str]] = defaultdict(set)
        self.reads: dict[str, set[str]] = defaultdict(set)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks on every module and an eye on every operator, for as long as the run takes."""
        with ExitStack() as stack:
            for module in {id(module): module for module in self.places.modules.values()}.values():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                before = module.register_forward_pre_hook(self._enter, prepend=True)
                after = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(watch_operators(self._operate))
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self.places.internal:
            self._record_entry(module, self._chain())
        self.entered.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self.entered:  # an error below may have skipped the inner ones
            while self.entered.pop() is not module:
                pass

    def _chain(self) -> tuple[nn.Module, ...]:
        """Everything whose code is running, the innermost last; methods entered directly are noted."""
        inner = running_methods(self.places, self.entered[-1] if self.entered else None)
        for method in inner:
            if not any(method.module is one for one in self.entered):
                outer = tuple(self.entered)
                self.methods[self.places.name(method.module)].add(method.name)
                self._note_bypass(method.module, outer or (self.places.root,))
        return (*self.entered, *(method.module for method in inner))

    def _record_entry(self, module: nn.Module, chain: tuple[nn.Module, ...]) -> None:
        name = self.places.name(module)
        self.counts[name] = self.counts.get(name, 0) + 1
        if chain:
            self._note_bypass(module, chain)

    def _note_bypass(self, module: nn.Module, chain: tuple[nn.Module, ...]) -> None:
        for outer in self.places.bypassed(module, chain):
            self.bypassed[self.places.name(outer)].add(self.places.name(module))

    def _operate(self, operator: str, tensors: list[torch.Tensor]) -> None:
        if operator.startswith(_SHAPE_ONLY):
            return
        for tensor in tensors:
            parameter = self.parameters.get(id(tensor))
            if parameter is None:
                continue
            owners = {id(owner) for owner in self.places.owners(parameter)}
            if owners & {id(module) for module in self.entered}:
                continue
            chain = self._chain()
            if not owners & {id(module) for module in chain}:
                self.reads[self.places.parameter_name(parameter)].add(self.places.name(_reader(chain)))

    def calls(self) -> Calls:
        places = self.places
        repeated = {
            name: count
            for name, count in self.counts.items()
            if count > 1 and next(places.modules[name].parameters(), None) is not None
        }
        return Calls(
            called=frozenset(self.counts),
            internal=frozenset(name for name, module in places.modules.items() if id(module) in places.internal),
            bypassed=_freeze(self.bypassed),
            methods=_freeze(self.methods),
            foreign_reads=_freeze(self.reads),
            repeated=repeated,
            order=tuple(self.counts),
        )


def _reader(chain: tuple[nn.Module, ...]) -> nn.Module:
    """Whose code chose to use the parameter: not torch's Dropout that it was handed to."""
    written = [module for module in chain if not type(module).__module__.startswith("torch.nn.")]
    return (written or chain)[-1]


def _freeze(table: dict[str, set[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(inner) for name, inner in sorted(table.items())}


@dataclasses.dataclass
class Fakes:
    """The stand-ins of one run."""

    originals: dict[int, nn.Parameter]
    """Identity of a fake parameter → the real one."""
    inputs: Any


@contextmanager
def faked(model: nn.Module, inputs: Any, mode: Any) -> Iterator[Fakes]:
    """Swap parameters and buffers for fake ones, ties kept; `preserved` puts the real ones back."""
    device = _device(model, inputs)
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _fake(tensor, mode, device)
        return made[id(tensor)]

    originals: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = fake(parameter)  # type: ignore[assignment]
                originals[id(fake(parameter))] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    yield Fakes(originals, _map_tensors(inputs, fake))


def _fake(tensor: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
    if tensor.device.type != "meta":
        return mode.from_tensor(tensor)
    stand_in = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
    return stand_in.requires_grad_(tensor.requires_grad)


def _device(model: nn.Module, inputs: Any) -> torch.device:
    found: list[torch.device] = []
    _map_tensors(inputs, lambda tensor: found.append(tensor.device) or tensor)
    found += [tensor.device for tensor in (*model.parameters(), *model.buffers())]
    return next((device for device in found if device.type != "meta"), torch.device("cpu"))


def _map_tensors(thing: Any, change: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return change(thing)
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_map_tensors(item, change) for item in thing))
    if type(thing) in (list, tuple, set):
        return type(thing)(_map_tensors(item, change) for item in thing)
    if isinstance(thing, dict):
        return {key: _map_tensors(item, change) for key, item in thing.items()}
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}
        return dataclasses.replace(thing, **{name: _map_tensors(item, change) for name, item in fields.items()})
    return thing
