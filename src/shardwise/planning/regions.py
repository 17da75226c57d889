"""Regions of a block that can be split: pairs of linear layers, and modules that process each position independently.

A region is the code between linear layers whose outputs are combined in other linear layers. It is found by data flow
analysis of a block's code, never by names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.planning.calls import enclosing, is_opaque, is_within
from shardwise.planning.source.flow import DataFlow
from shardwise.planning.source.values import Operation, Source, Trail

_ELEMENTWISE = {
    "abs", "add", "any", "bfloat16", "clamp", "clip", "clone", "contiguous", "detach", "div", "double", "dropout",
    "exp", "float", "half", "isinf", "isnan", "log", "masked_fill", "mul", "nan_to_num", "neg", "pow", "rsqrt", "sqrt",
    "square", "sub", "to", "type", "type_as", "where", "Dropout", "Identity",
    "celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "quick_gelu",
    "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softsign", "swish", "tanh",
    *(name for name in dir(nn.modules.activation) if "max" not in name and name not in ("GLU", "MultiheadAttention")),
}  # fmt: skip
"""Elementwise operations."""
_RESHAPING = {"view", "reshape", "unflatten"}
_HEADWISE = _ELEMENTWISE | _RESHAPING | {
    "[]", "[number]", "a function that cannot be read", "arange", "baddbmm", "bmm", "cat", "chunk", "einsum", "expand",
    "expand_as", "flatten", "flex_attention", "masked_fill_", "matmul", "mT", "movedim", "permute", "repeat",
    "repeat_interleave", "scaled_dot_product_attention", "softmax", "Softmax", "split", "squeeze", "stack", "swapaxes",
    "T", "transpose", "tril", "unbind", "unsqueeze", "update", "view_as",
}  # fmt: skip
"""Operations of attention, which process each head independently once features are split into heads."""
_ON_PARTS = _ELEMENTWISE | {"[number]"}
"""Operations that can process a part of the sequence; the last one indexes a tuple."""

Sources = Mapping[str, dict[Source, set[Operation]]]
"""Maps the FQN of a module to the sources of its input and the operations on each."""


def by_source(trail: Trail) -> dict[Source, set[Operation]]:
    """Return the sources of a value, each with the operations applied to it."""
    found: dict[Source, set[Operation]] = defaultdict(set)
    for source, operation in trail:
        found[source] |= {operation} if operation is not None else set()
    return found


def computes_linear(module: nn.Module) -> bool:
    """Whether the module computes a linear layer, including transformers' Conv1D with its transposed weight."""
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_plain or f"{type(module).__module__}.{type(module).__name__}" == "transformers.pytorch_utils.Conv1D"


def called_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers of a model that its code can call, with their FQNs."""
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            if (computes_linear(child) or isinstance(child, nn.Linear)) and not is_opaque(module):
                yield f"{name}.{child_name}".lstrip("."), child


def layer_sizes(layer: Any) -> tuple[int, int]:
    """Number of inputs and outputs of a linear layer."""
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else tuple(layer.weight.shape)


def is_linear(module: Any) -> bool:
    """Whether the module is a linear layer with a plain weight."""
    return computes_linear(module) and type(module.weight) is nn.Parameter


@dataclass(slots=True)
class Region:
    """Linear layers and the layers that combine their outputs, without another module with matrices in between."""

    given: dict[str, set[Operation]] = field(default_factory=lambda: defaultdict(set))
    """First layers, each with the operations on its output."""
    takers: list[str] = field(default_factory=list)
    """Last layers, which take the result."""
    inside: list[str] = field(default_factory=list)
    """Modules in between with vectors of head size: norms of queries and keys."""
    biases: dict[str, set[Operation]] = field(default_factory=lambda: defaultdict(set))
    """Embeddings whose output is used in between: a relative position bias has a column per head."""
    foreign: set[Source] = field(default_factory=set)
    """Arguments and parameters that are used in between."""
    heads: dict[str, int] = field(default_factory=dict)
    """Number of heads of each first layer; empty without heads."""
    why_whole: str = ""
    """Why the code in between needs all features; empty if it does not."""

    @property
    def layers(self) -> list[str]:
        """All linear layers of the region, which are split together."""
        return [*self.given, *self.biases, *self.takers]

    @property
    def owner(self) -> str:
        """FQN of the innermost module around all layers."""
        names = [*self.layers, *self.inside]
        return next(name for name in enclosing(self.takers[0]) if all(is_within(each, name) for each in names))

    @property
    def reshapes(self) -> list[Operation]:
        """Operations that split features into heads or merge them."""
        return [each for operations in self.given.values() for each in operations if each.name in _RESHAPING]

    def styles(self) -> dict[str, str]:
        """Style of each module of the region."""
        if self.why_whole:
            whole = dict.fromkeys(self.given, "colwise_gather_output")
            return whole | dict.fromkeys(self.takers, "rowwise_split_input")
        parts = dict.fromkeys([*self.given, *self.biases], "colwise") | dict.fromkeys(self.inside, "replicate")
        return parts | dict.fromkeys(self.takers, "rowwise")

    def add(self, other: Region) -> None:
        """Merge a region that shares layers with this one."""
        self.takers += other.takers
        self.inside += [each for each in other.inside if each not in self.inside]
        self.foreign |= other.foreign
        for mine, theirs in ((self.given, other.given), (self.biases, other.biases)):
            for name, operations in theirs.items():
                mine[name] |= operations


def find_regions(flow: DataFlow, modules: Mapping[str, Any]) -> list[Region]:
    """Return the regions of a block.

    Args:
        flow: Data flow of the block.
        modules: Modules of the model by FQN, in its order.
    """
    sources = {name: by_source(trail) for name, trail in flow.inputs.items()}
    regions: list[Region] = []
    for name in (name for name in modules if name in sources and is_linear(modules[name])):
        region = _trace_back(name, sources, modules)
        taken = {each for other in regions for each in other.takers}
        if region is None or region.given.keys() & taken or any(name in other.given for other in regions):
            continue
        same = next((other for other in regions if other.given.keys() & region.given.keys()), None)
        same.add(region) if same is not None else regions.append(region)
    for region in regions:
        region.given = {name: region.given[name] for name in modules if name in region.given}
        region.why_whole = _why_whole(region, sources, flow, modules)
    return regions


def _trace_back(taker: str, sources: Sources, modules: Mapping[str, Any]) -> Region | None:
    """Return the region that ends in a layer; None if another module computes a part of its input."""
    region = Region(takers=[taker])
    for source, operations in sources[taker].items():
        if source.kind != "module":
            region.foreign.add(source)
        elif is_linear(modules[source.name]) and source.name != taker:
            region.given[source.name] |= operations
        elif isinstance(modules[source.name], nn.Embedding):
            region.biases[source.name] |= operations
        elif _is_headwise(source.name, sources, modules):
            region.inside.append(source.name)
            for inner, before in sources[source.name].items():
                region.given[inner.name] |= before | operations
        else:
            return None
    return region if region.given else None


def _is_headwise(name: str, sources: Sources, modules: Mapping[str, Any]) -> bool:
    """Whether a module has only vectors of head size, and its inputs are heads."""
    sizes = {tuple(parameter.shape) for parameter in modules[name].parameters()}
    for source, operations in sources.get(name, {}).items():
        if source.kind != "module" or not is_linear(layer := modules[source.name]):
            return False
        features = layer_sizes(layer)[1]
        heads = head_count(features, operations)
        if heads is None or sizes != {(features // heads,)}:
            return False
    return bool(sources.get(name))


def head_count(features: int, operations: Iterable[Operation]) -> int | None:
    """Return the number of heads that features are split into, by the sizes in the code; None if ambiguous."""
    found = set()
    for name, sizes, _ in operations:
        last, before = (sizes[-1], sizes[-2]) if name in _RESHAPING and len(sizes) > 1 else (0, None)
        if last is not None and 1 < last < features and features % last == 0:
            found.add(features // last)
        elif last in (None, -1) and before is not None and 1 < before <= features and features % before == 0:
            found.add(before)
    return found.pop() if len(found) == 1 else None


def _why_whole(region: Region, sources: Sources, flow: DataFlow, modules: Mapping[str, Any]) -> str:
    """Return why the code between the layers cannot process parts of the features; empty if it can. Sets `heads`."""
    features = {name: layer_sizes(modules[name])[1] for name in region.given}
    inputs = {layer_sizes(modules[name])[0] for name in region.takers}
    widest, first = max((size, name) for name, size in features.items())
    if len(inputs) > 1 or widest > min(inputs):
        return f"{short(first)} makes {widest} features for {min(inputs)} inputs: several projections in one"
    for name in region.given:
        users = [user for user, given in sources.items() if any(source.name == name for source in given)]
        if odd := [user for user in users if user not in (*region.takers, *region.inside)]:
            return f"{short(name)} is used by {short(odd[0])} too"
    entering = {source for name in region.given for source in sources.get(name, ()) if source.kind == "argument"}
    strange = [source.name for source in region.foreign if source.kind == "parameter" or source in entering]
    names = {each.name for operations in (*region.given.values(), *region.biases.values()) for each in operations}
    is_split = bool(names & (_RESHAPING | {"flatten"}))
    if odd := sorted(names - (_HEADWISE if is_split else _ELEMENTWISE)):
        return f"between them there is {odd[0]!r}, which may mix features"
    heads = {name: head_count(size, region.given[name]) for name, size in features.items()} if is_split else {}
    if unclear := [name for name, number in heads.items() if number is None]:
        return f"into how many heads {short(unclear[0])} is split is not clear from the code"
    region.heads = {name: number for name, number in heads.items() if number is not None}
    strange += [name for name in region.biases if modules[name].embedding_dim != max(region.heads.values(), default=0)]
    if not is_split:
        strange += features.keys() & {source.name for source in by_source(flow.returned)}
        strange += [] if set(features.values()) == inputs else [first]
    return f"{short(min(strange))} is used between them" if strange else ""


def short(name: str) -> str:
    """The last part of an FQN."""
    return name.rpartition(".")[2]


class SequenceRegions:
    """Modules of a block that process a part of the sequence, and modules that need the full sequence.

    Norms and residual additions process parts. All other modules, such as those with split layers, gather their input
    and split their output.

    Args:
        flow: Data flow of the block.
        block: FQN of the block.
        regions: Regions of the model.
        modules: Modules of the model by FQN.
        styles: Styles of its modules.
    """

    def __init__(
        self,
        flow: DataFlow,
        block: str,
        regions: Iterable[Region],
        modules: Mapping[str, nn.Module],
        styles: Mapping[str, str],
    ) -> None:
        self.more: dict[str, list[str]] = defaultdict(list)
        """Additional styles of modules."""
        regions = [region for region in regions if is_within(region.takers[0], block)]
        self._given = {name for region in regions for name in region.given}
        self._between = self._given.union(*((*region.biases, *region.inside) for region in regions))
        self._takers = {name for region in regions for name in region.takers if name in styles}
        own = self._between | {name for region in regions for name in region.takers}
        others = [name for name in flow.inputs if name not in own]
        self.norms = [name for name in others if all(each.ndim == 1 for each in modules[name].parameters())]
        around = (above for norm in self.norms for above in enclosing(norm) if is_within(above, block))
        self._on_parts = {block, *around}
        self._steps = [step for name in self.norms for step in flow.inputs[name]] + list(flow.returned)
        self.problem = flow.problem or self._find_problem(flow)
        parts: dict[str, list[str]] = defaultdict(list)
        for name in flow.inputs if not self.problem else ():
            if name not in self.norms:
                outermost = [each for each in (name, *enclosing(name)) if is_within(each, block)]
                parts[[each for each in outermost if each not in self._on_parts][-1]].append(name)
        for part, layers in parts.items():
            self._lay_out(part, layers)

    def _find_problem(self, flow: DataFlow) -> str:
        """Return why the code gives another result on a part of the sequence; empty if it does not."""
        for name in sorted(self._on_parts):
            if flow.sizes_read.get(name):
                return f"{name} reads the length of its input"
        for source, done in sorted(self._steps, key=str):
            if source.kind == "parameter":
                return f"{source.name} is used outside a module of its own"
            if done is not None and done.module in self._on_parts and done.name not in _ON_PARTS:
                return f"in {done.module} there is {done.name!r}"
        return ""

    def _lay_out(self, part: str, layers: list[str]) -> None:
        """Choose how a module gathers the full sequence and returns a part of it."""
        steps = [(source.name, done) for source, done in self._steps if source.name in layers]
        ends = {name for name, _ in steps} - self._between
        within = {
            done.name for name, done in steps if name in ends and done is not None and is_within(done.module, part)
        }
        if part in self._given or part not in self._between | self._takers:
            self.more[part].append("whole sequence")
        if ends <= self._takers and within <= _ON_PARTS:
            for name in ends:
                self.more[name].append("to sequence")
        elif ends:
            self.more[part].append("split output")
