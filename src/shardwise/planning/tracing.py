"""Follow a forward pass on fake tensors to see which modules it calls."""

import dataclasses
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.compat import fake_tensor_mode, watch_operators
from shardwise.models.nested_tensors import change_tensors, find_tensors
from shardwise.models.random_state import kept_random_state
from shardwise.planning.calls import Calls, Places, Use, collect_uses, has_forward, has_parameters
from shardwise.planning.source.functions import underlying


def trace_calls(model: nn.Module, example_inputs: Any) -> Calls:
    """Run `model` once on fake tensors and report how its modules were entered.

    Nothing is computed, and the model does not change: parameters, buffers, hooks, attributes, training
    mode and random state are restored, also after an error.

    Args:
        model: On any device; meta parameters count as on the device of the inputs.
        example_inputs: A tuple of positional arguments, a dict of keyword arguments, or the only argument.

    Returns:
        The facts of this one run. `complete` is False if the forward could not finish on fake tensors, for
        example because it reads data; `notes` then says why.
    """
    if not has_forward(model):
        return Calls(complete=False, notes=(f"tracing: {type(model).__name__} has no forward",))
    places = Places(model)
    watch = _Watch(places)
    args, kwargs = (example_inputs,), {}
    if isinstance(example_inputs, tuple) and not hasattr(example_inputs, "_fields"):
        args = example_inputs
    elif type(example_inputs) is dict:
        args, kwargs = (), example_inputs
    try:
        with on_fake_tensors(model, (args, kwargs)) as ((args, kwargs), watch.parameters), watch.hooked():
            model(*args, **kwargs)
    except Exception as error:  # the model's own code runs here and may raise anything
        where = innermost_module(error.__traceback__, model) or "the root"
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return dataclasses.replace(watch.calls(), complete=False, notes=(f"tracing stopped in {where}: {why}",))
    return watch.calls()


@contextmanager
def on_fake_tensors(model: nn.Module, inputs: Any) -> Iterator[tuple[Any, dict[int, nn.Parameter]]]:
    """Swap parameters and buffers for fake ones in the context; restore the model on exit.

    Yields:
        The inputs as fake tensors, and the real parameters by the identity of the fake ones.
    """
    with _preserved(model), fake_tensor_mode() as mode, torch.enable_grad():
        fake = _faker(model, inputs, mode)
        parameters = _swap_tensors(model, fake)
        yield change_tensors(inputs, fake), parameters


def innermost_module(trace: types.TracebackType | None, model: nn.Module) -> str | None:
    """Return the name of the innermost module of the model in a traceback, or None."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = names[id(owner)]
        trace = trace.tb_next
    return found


@contextmanager
def _preserved(model: nn.Module) -> Iterator[None]:
    """Restore all attributes of all modules, and the random state, also after an error."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    # Lists, dictionaries and sets of the modules, including hooks and parameter tables.
    held = [value for _, attributes in before for value in attributes.values()]
    before += [(value, value.copy()) for value in held if type(value) in (list, dict, set, OrderedDict)]
    try:
        with kept_random_state():
            yield
    finally:
        for holder, content in before:
            if holder or content:
                holder.clear()
                holder.extend(content) if isinstance(holder, list) else holder.update(content)


def _running_methods(places: Places, entered: nn.Module | None) -> list[tuple[nn.Module, str]]:
    """Return the methods running in the call of `entered`, outermost first, without consecutive repeats of a module."""
    found: list[tuple[nn.Module, str]] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, nn.Module):
            if first is entered and code.co_name == "_call_impl":
                break
            if first in places and _is_method(first, code):
                if found and found[-1][0] is first:
                    found.pop()
                found.append((first, code.co_name))
        frame = frame.f_back
    return [(module, name) for module, name in reversed(found) if module is not entered and name != "__call__"]


def _is_method(module: nn.Module, code: types.CodeType) -> bool:
    """Whether the code is a method of the module that is not torch's."""
    mro = type(module).__mro__
    functions = [underlying(vars(cls).get(code.co_name))[0] for cls in mro[: mro.index(nn.Module)]]
    return any(function is not None and function.__code__ is code for function in functions)


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


class _Watch:
    """Records the calls and parameter uses of the run."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.parameters: dict[int, nn.Parameter] = {}
        """Maps the identity of a fake parameter to the real one."""
        self.entered: list[nn.Module] = []
        self.counts: Counter[str] = Counter()
        self.uses: dict[Use, None] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook every module and watch every operator in the context."""
        with ExitStack() as stack:
            for module in self.places.root.modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    stack.callback(module.register_forward_pre_hook(self._enter, prepend=True).remove)
                    stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(watch_operators(self._operate))
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self.places.internal:
            self.counts[self.places.name(module)] += 1
            self.uses[Use("call", self._names(self._chain()), self.places.name(module))] = None
        self.entered.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self.entered:  # an error may have skipped the hooks of inner modules
            while self.entered.pop() is not module:
                pass

    def _chain(self) -> tuple[nn.Module, ...]:
        """Return the modules whose code is running, the innermost last; record methods entered directly."""
        inner = _running_methods(self.places, self.entered[-1] if self.entered else None)
        for module, name in inner:
            if not any(module is one for one in self.entered):
                around = self._names(self.entered) or ("",)
                self.uses[Use("method", around, self.places.name(module), name)] = None
        return (*self.entered, *(module for module, _ in inner))

    def _names(self, modules: Iterable[nn.Module]) -> tuple[str, ...]:
        return tuple(map(self.places.name, modules))

    def _operate(self, operator: str, tensors: list[torch.Tensor]) -> None:
        if operator.startswith(_SHAPE_ONLY):
            return
        for parameter in [self.parameters[id(tensor)] for tensor in tensors if id(tensor) in self.parameters]:
            owners = {id(owner) for owner in self.places.owners(parameter)}
            if owners & set(map(id, self.entered)):
                continue
            chain = self._chain()
            if not owners & set(map(id, chain)):
                # The module whose code uses the parameter, not torch's Dropout that receives it.
                written = [module for module in chain if not type(module).__module__.startswith("torch.nn.")]
                reader = self._names(tuple(written or chain)[-1:])
                self.uses[Use("read", reader, self.places.parameter_name(parameter))] = None

    def calls(self) -> Calls:
        """Return the recorded calls."""
        again = [name for name, count in self.counts.items() if count > 1]
        repeated = frozenset(name for name in again if has_parameters(self.places.modules[name]))
        return collect_uses(self.places, ((use, True) for use in self.uses), Calls(), repeated=repeated)


Fake = Callable[[torch.Tensor], torch.Tensor]


def _faker(model: nn.Module, inputs: Any, mode: Any) -> Fake:
    """Return a function that maps each tensor to one fake tensor; meta tensors get the device of the inputs."""
    tensors = (*find_tensors(inputs), *model.parameters(), *model.buffers())
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made and tensor.device.type != "meta":
            made[id(tensor)] = mode.from_tensor(tensor)
        elif id(tensor) not in made:
            stand_in = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            stand_in = nn.Parameter(stand_in, requires_grad=False) if isinstance(tensor, nn.Parameter) else stand_in
            made[id(tensor)] = stand_in.requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    return fake


def _swap_tensors(model: nn.Module, fake: Fake) -> dict[int, nn.Parameter]:
    """Swap parameters and buffers for fake ones, ties kept; return the real parameters by the fakes' identity."""
    originals = {id(fake(parameter)): parameter for parameter in model.parameters()}
    for module in model.modules():
        tables: Any = (module._parameters, module._buffers)
        for table in tables:
            table.update({name: fake(tensor) for name, tensor in table.items() if tensor is not None})
    return originals
