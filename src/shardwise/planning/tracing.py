"""Follow a forward pass on fake tensors to see which modules it calls."""

import dataclasses
import random
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.compat import fake_tensor_mode, watch_operators
from shardwise.planning.calls import Calls, CallTable, Fact, Places, has_forward, has_parameters
from shardwise.planning.source.functions import underlying


class Method(NamedTuple):
    """A method of a module that runs without the module having been called."""

    module: nn.Module
    name: str


def running_methods(places: Places, entered: nn.Module | None) -> list[Method]:
    """Methods running inside the call of `entered`, outermost first, each module once in a row."""
    found: list[Method] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module):
                if first is entered and code.co_name == "_call_impl":
                    break
                if first in places and _is_method(first, code):
                    if found and found[-1].module is first:
                        found.pop()
                    found.append(Method(first, code.co_name))
        frame = frame.f_back
    inside = [method for method in reversed(found) if method.module is not entered]
    return [method for method in inside if method.name != "__call__"]


def failing_module(error: BaseException, places: Places) -> str:
    """The name of the innermost module whose call an error came out of."""
    name, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_locals.get("self") if code.co_name == "_call_impl" else None
        if isinstance(module, nn.Module) and module in places:
            name = places.name(module)
        trace = trace.tb_next
    return name


def _is_method(module: nn.Module, code: types.CodeType) -> bool:
    for cls in type(module).__mro__:
        if cls is nn.Module:
            return False
        function = underlying(vars(cls).get(code.co_name))[0]
        if function is not None and function.__code__ is code:
            return True
    return False


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore every attribute of every module, and the random state, however the block ends."""
    before = [(module, dict(vars(module)), _contents(module)) for module in model.modules()]
    states = _random_states()
    try:
        yield
    finally:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for holder, content in contents:
                _refill(holder, content)
        _restore_random(states)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """The module's own lists, dictionaries and sets (hooks and parameter tables, too) with their content."""
    holders = [value for value in vars(module).values() if type(value) in (list, dict, set, OrderedDict)]
    return [(holder, holder.copy()) for holder in holders]


def _refill(holder: Any, content: Any) -> None:
    if isinstance(holder, list):
        holder[:] = content
    elif len(holder) or len(content):
        holder.clear()
        holder.update(content)


def _random_states() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.random.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state() if numpy is not None else None,
    }


def _restore_random(states: dict[str, Any]) -> None:
    torch.random.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if states["numpy"] is not None:
        sys.modules["numpy"].random.set_state(states["numpy"])


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
        self.counts: Counter[str] = Counter()
        self.table = CallTable(places, Calls())

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
            self.counts[self.places.name(module)] += 1
            self.table.enter(Fact("call", self._chain(), module))
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
                outer = tuple(self.entered) or (self.places.root,)
                self.table.enter(Fact("method", outer, method.module, method.name))
        return (*self.entered, *(method.module for method in inner))

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
                owner, _, name = self.places.parameter_name(parameter).rpartition(".")
                self.table.enter(Fact("read", (_reader(chain),), self.places.modules[owner], name))

    def calls(self) -> Calls:
        again = [name for name, count in self.counts.items() if count > 1]
        return self.table.calls(repeated=frozenset(n for n in again if has_parameters(self.places.modules[n])))


def _reader(chain: tuple[nn.Module, ...]) -> nn.Module:
    """Whose code chose to use the parameter: not torch's Dropout that it was handed to."""
    written = [module for module in chain if not type(module).__module__.startswith("torch.nn.")]
    return (written or chain)[-1]


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
