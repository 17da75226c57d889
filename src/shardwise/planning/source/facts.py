"""Analysis of a model's source: calls of modules, entry points, parameter use."""

import inspect
import types
from collections import defaultdict
from dataclasses import replace

from torch import nn

from shardwise.planning import calls
from shardwise.planning.calls import Calls, Places, Use, callable_children, collect_uses, has_forward, has_parameters
from shardwise.planning.source.functions import find_node, is_generator, start, underlying
from shardwise.planning.source.values import Analysis, Frame

Entry = tuple[str, str]
"""A module's name and the method by which code enters it."""
_BY_SCRIPT: Entry = ("", "?")


class CallRecorder:
    """Results for each entry that was read."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.analyses: dict[Entry, Analysis] = {}
        self.assumed: set[str] = set()
        self.unreadable: dict[str, None] = {}
        self.notes: list[str] = []
        self._failed: set[tuple[type, str]] = set()
        self._touched: set[int] = set()

    def follow(self, entry: Entry) -> bool:
        """Read an entry and all entries that it reaches; return whether the entry itself computes."""
        pending = [entry]
        while pending:
            current = pending.pop()
            if current not in self.analyses:
                pending += self._keep(current, self._read(*current))
        return self.analyses[entry].activity > 0

    def assume_called(self, name: str) -> None:
        """Assume that a script calls this module."""
        self.assumed.add(name)
        analysis = self.analyses.get(_BY_SCRIPT) or Analysis(self.places)
        analysis.add("call", [self.places.root], name)
        self._keep(_BY_SCRIPT, analysis)
        self.follow((name, "forward"))

    def is_touched(self, module: nn.Module) -> bool:
        """Whether code that was read uses the module, a descendant or one of its parameters."""
        return id(module) in self._touched

    def _keep(self, entry: Entry, analysis: Analysis) -> list[Entry]:
        """Store an analysis; return the entries that it reaches."""
        self.analyses[entry] = analysis
        used = [self.places.modules[use.module] for use in analysis.uses if use.kind != "escape"]
        self._touched |= self.places.covered(used)
        return [(use.target, "forward") for use in analysis.uses if use.kind == "call"]

    def _read(self, name: str, method: str) -> Analysis:
        module = self.places.modules[name]
        analysis = Analysis(self.places)
        if calls.is_opaque(module) or (type(module).__module__.startswith("torch.") and not self._has_parts(module)):
            analysis.activity = 1
            return analysis
        if (type(module), method) not in self._failed:
            try:
                if _analyze(analysis, module, method):
                    return analysis
                why = "no source"
            except Exception as error:  # unusual code must not stop the analysis of the rest of the model
                why = f"{type(error).__name__}: {error}"
            self._failed.add((type(module), method))
            if module._modules:
                named = f"{type(module).__qualname__}.{method}"
                self.notes.append(f"{named} could not be read ({why}): its parts count as called")
        return self._assume_children_called(module)

    def _has_parts(self, module: nn.Module) -> bool:
        return any(id(child) not in self.places.internal for child in module.children())

    def _assume_children_called(self, module: nn.Module) -> Analysis:
        if module._modules:
            self.unreadable[type(module).__qualname__] = None
        analysis = Analysis(self.places)
        analysis.activity = 1
        for _, child in callable_children(module):
            if id(child) not in self.places.internal:
                analysis.add("call", [module], self.places.name(child))
        return analysis


def _analyze(analysis: Analysis, module: nn.Module, method: str) -> bool:
    """Read a method of a module; return whether it has source."""
    frame = Frame(analysis, (module,), None, {}, receiver=module)
    own = vars(module).get(method)
    result = start(own if own is not None else inspect.getattr_static(type(module), method), module, frame)
    if result is None:
        return False
    frame.record_escape(result)
    entered = inspect.getattr_static(type(module), "__call__")
    if method == "forward" and entered is not nn.Module.__call__:
        analysis.counts = {}
        start(entered, module, frame)
    return True


_MACHINERY = (
    "torch.", "transformers.modeling_utils", "transformers.generation", "transformers.integrations",
    "transformers.utils", "transformers.trainer", "diffusers.models.modeling_utils", "diffusers.loaders",
    "diffusers.configuration_utils", "huggingface_hub", "pytorch_lightning.", "lightning.",
    "peft.",
)  # fmt: skip
_BOOKKEEPING = (
    "reset_", "init", "tie_", "load", "save", "set_", "from_", "to_", "num_", "count_",
    "gradient_checkpointing", "resize_", "prune_", "fuse_", "unfuse_", "enable_", "disable_", "freeze",
    "unfreeze", "merge_", "unmerge_", "add_", "remove_", "register_", "prepare_inputs_for_generation",
    "configure_", "quantize", "dequantize", "push_", "export", "extra_repr", "train", "eval",
)  # fmt: skip
_ENTRIES = {"training_step", "train_step", "eval_step"}


def _public_methods(root: str, recorder: CallRecorder) -> list[str]:
    """Read the public methods of a module that scripts call; return the methods that compute."""
    found: list[str] = []
    model = recorder.places.modules[root]
    for name in _candidates(type(model)):
        function = underlying(inspect.getattr_static(type(model), name))[0]
        node = find_node(function) if function is not None else None
        if (
            name == "generate"
            and function is not None
            and (function.__module__ or "").startswith(("transformers.", "peft."))
        ):
            found.append(name)  # long code that ends in self(...)
            continue
        if node is None or not recorder.follow((root, name)):
            continue
        if is_generator(node) or inspect.iscoroutinefunction(function):
            recorder.notes.append(f"{name}() computes step by step as its caller asks; it cannot be an entry point")
        else:
            found.append(name)
    return found


def _candidates(cls: type) -> list[str]:
    names: dict[str, None] = {}
    for base in cls.__mro__:
        module = base.__module__ or ""
        for name, attribute in vars(base).items():
            if name in names or name.startswith("_") or name == "forward" or base is nn.Module or base is object:
                continue
            if hasattr(nn.Module, name) or not isinstance(attribute, types.FunctionType):
                continue
            if name != "generate" and (module.startswith(_MACHINERY) or ".generation" in module):
                continue
            if name in _ENTRIES or not name.startswith(_BOOKKEEPING):
                names[name] = None
    return list(names)


def read_calls(model: nn.Module, traced: Calls | None = None) -> Calls:
    """Find the calls between modules by reading the source of the model's classes, without running it.

    Args:
        model: Any module.
        traced: Facts of a complete trace of the forward, which take precedence because they are exact on its path.
            Conditional modules stay conditional: another run may route differently.
    """
    places = Places(model)
    recorder = CallRecorder(places)
    if has_forward(model):
        recorder.follow(("", "forward"))
    below_forward = set(recorder.analyses)
    public_methods = _public_methods("", recorder)
    parts = [places.name(part) for _, part in callable_children(model) if has_parameters(part)]
    is_container = not has_forward(model) and not public_methods
    roots = tuple(dict.fromkeys(parts)) if is_container and parts else ("",)
    methods_of_parts = {name: _public_methods(name, recorder) for name in roots if name}
    for name, module in places.modules.items():
        # No entry was found: read it as if the user's script calls it.
        skipped = not name or calls.is_holder(module) or id(module) in places.internal or not has_parameters(module)
        if not skipped and not recorder.is_touched(module):
            recorder.assume_called(places.name(module))
    seen = traced or Calls()
    called = {""} if has_forward(model) else set()
    uses = [(use, True) for use in _escaped(recorder)]
    for entry, analysis in recorder.analyses.items():
        for use in analysis.uses:
            called |= {use.target} if use.kind == "call" else set()
            is_met = entry in below_forward and use.module in seen.called
            if not (is_met and use.kind == "read" and use.target not in seen.foreign_reads):
                uses.append((use, not is_met and use.module not in recorder.assumed))
    for name, methods in methods_of_parts.items():
        uses += [(Use("method", (name,), name, method), False) for method in methods]
    unconditional = {*roots, "", *_unconditional(recorder, roots)}
    return collect_uses(
        places,
        uses,
        replace(seen, called=seen.called | called),
        assumed=frozenset(recorder.assumed - seen.called),
        conditional=frozenset(name for name in called - unconditional if has_parameters(places.modules[name])),
        repeated=seen.repeated | (_repeated(recorder) - seen.called),
        roots=roots,
        public_methods=tuple(public_methods),
        unreadable=tuple(recorder.unreadable),
        notes=tuple(dict.fromkeys(recorder.notes)),
    )


def _escaped(recorder: CallRecorder) -> list[Use]:
    """Return reads by callers of modules that return a parameter, unless its owner is still entered."""
    places = recorder.places
    returned = {
        name: [use for use in analysis.uses if use.kind == "escape"]
        for (name, method), analysis in recorder.analyses.items()
        if method == "forward"
    }
    return [
        Use("read", call.chain, escape.target)
        for analysis in recorder.analyses.values()
        for call in analysis.uses
        if call.kind == "call"
        for escape in returned.get(call.target, ())
        if id(places.modules[escape.module]) not in places.covered(places.modules[name] for name in call.chain)
    ]


def _unconditional(recorder: CallRecorder, roots: tuple[str, ...]) -> set[str]:
    """Return the modules that run for any data, from the roots down."""
    pending = [entry for entry in recorder.analyses if entry[0] in roots or entry == _BY_SCRIPT]
    seen = set(pending)
    certain: set[str] = set()
    while pending:
        analysis = recorder.analyses.get(pending.pop())
        for use in analysis.uses if analysis is not None else ():
            if use.conditional or use.kind not in ("call", "method"):
                continue
            if use.kind == "call":
                certain.add(use.target)
            if (entry := (use.target, use.method)) not in seen:
                seen.add(entry)
                pending.append(entry)
    return certain


def _repeated(recorder: CallRecorder) -> set[str]:
    """Return modules with parameters that one pass of the root's forward calls at least twice."""
    callers: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for (caller, method), analysis in recorder.analyses.items():
        for target, count in analysis.counts.items():
            if method == "forward" and target != caller:
                callers[target].append((caller, count))
    totals = {"": 1}

    def total(name: str) -> int:
        if name not in totals:
            totals[name] = 0  # a module that calls itself through others counts once
            totals[name] = min(2, sum(count * total(caller) for caller, count in callers[name]))
        return totals[name]

    return {
        name
        for name, module in recorder.places.modules.items()
        if total(name) > 1 and has_parameters(module) and name == recorder.places.name(module)
    }
