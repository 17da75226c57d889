"""Which modules are divided over the tensor axis of the mesh, how, and why the others are not.

Linear layers are divided in pairs: the first by its outputs (`colwise`), the second by its inputs (`rowwise`), so that a
rank computes its own features, or heads, from one to the other. A pair is found by following data through the code of a
block: between the two there may be operations on single elements, or on single heads. Where there is anything else, the
first gathers its output and the second takes its part of it again, which is right whatever happens between.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.config.schema import TensorConfig
from shardwise.errors import PlanError, fix_name
from shardwise.planning.calls import Calls, Places, enclosing, is_within
from shardwise.planning.experts import looks_like_experts, num_experts_of, why_not_divided
from shardwise.planning.groups import Node, Tree, name_matcher, unknown_pattern
from shardwise.planning.plan import ParallelModule
from shardwise.planning.source.flow import DataFlow, read_flow, size_attributes
from shardwise.planning.source.values import Operation, Source, Trail

STYLES = {
    "colwise": "divided by its outputs, which stay divided",
    "rowwise": "divided by its inputs, which are divided already",
    "colwise_gather_output": "divided by its outputs, which are gathered",
    "rowwise_split_input": "divided by its inputs, which are whole",
    "embedding": "divided by the rows of its table",
    "replicate": "works on this rank's heads; its gradients are summed over the ranks",
    "sequence": "works on this rank's part of the sequence; its gradients are summed over the ranks",
    "experts": "divided by experts; every rank has all tokens",
    "off": "left as it is",
}
"""What can be done to a module, by the names in `tensor.plan`."""
SHARD_DIMS = {
    "colwise": {"weight": 0, "bias": 0},
    "colwise_gather_output": {"weight": 0, "bias": 0},
    "rowwise": {"weight": 1},
    "rowwise_split_input": {"weight": 1},
    "embedding": {"weight": 0},
}
"""Dimension of each parameter that a style divides; the others are whole on every rank."""
_TRANSFORMERS = {
    **{style: style for style in ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")},
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "replicate",
    "moe_tp_experts": "experts",
}
"""transformers' names of styles."""
DIVIDED = "divided already"
"""What the plan says of a module that the user has divided."""
VERIFY = "verify"
"""What the plan says of the model where the first forward is compared with one on whole tensors."""

_ELEMENTWISE = {
    "abs", "add", "any", "bfloat16", "clamp", "clip", "clone", "contiguous", "detach", "div", "double", "dropout",
    "exp", "float", "half", "isinf", "isnan", "log", "masked_fill", "mul", "nan_to_num", "neg", "pow", "rsqrt", "sqrt",
    "square", "sub", "to", "type", "type_as", "where", "Dropout", "Identity",
    "celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "quick_gelu",
    "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softsign", "swish", "tanh",
    *(name for name in dir(nn.modules.activation) if "max" not in name and name not in ("GLU", "MultiheadAttention")),
}  # fmt: skip
"""Operations on each element by itself."""
_SPLITTING = {"view", "reshape", "unflatten", "flatten"}
_HEADWISE = _ELEMENTWISE | _SPLITTING | {
    "[]", "[number]", "a function that cannot be read", "arange", "baddbmm", "bmm", "cat", "chunk", "einsum", "expand",
    "expand_as", "flex_attention", "masked_fill_", "matmul", "mT", "movedim", "permute", "repeat", "repeat_interleave",
    "scaled_dot_product_attention", "softmax", "Softmax", "split", "squeeze", "stack", "swapaxes", "T", "transpose",
    "tril", "unbind", "unsqueeze", "update", "view_as",
}  # fmt: skip
"""Operations that attention is made of: once features are split into heads, they work on each head by itself."""


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a plain matrix with a plain weight."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and type(module.weight) is nn.Parameter
    )


def _by_source(trail: Trail) -> dict[Source, set[Operation]]:
    found: dict[Source, set[Operation]] = defaultdict(set)
    for source, operation in trail:
        found[source] |= {operation} if operation is not None else set()
    return found


@dataclass(slots=True)
class Region:
    """Linear layers whose outputs meet in others, without another module with matrices between them."""

    given: dict[str, set[Operation]] = field(default_factory=lambda: defaultdict(set))
    """The first layers, each with the operations on its output."""
    takers: list[str] = field(default_factory=list)
    """The layers that take the result."""
    inside: list[str] = field(default_factory=list)
    """Modules between them, with a vector of the size of a head."""
    biases: dict[str, set[Operation]] = field(default_factory=lambda: defaultdict(set))
    """Embeddings whose output is used between them: a relative position bias has a column for each head."""
    foreign: set[Source] = field(default_factory=set)
    """Arguments and parameters that are used between them."""
    heads: dict[str, int] = field(default_factory=dict)
    """Number of heads of each of the first layers; empty where there are none."""
    why_whole: str = ""
    """Why what is between them must see all features."""

    @property
    def names(self) -> list[str]:
        """All its modules."""
        return [*self.given, *self.biases, *self.inside, *self.takers]

    @property
    def owner(self) -> str:
        """The innermost module around all of them."""
        return next(name for name in enclosing(self.takers[0]) if all(is_within(each, name) for each in self.names))

    def styles(self) -> dict[str, str]:
        """What is done to each module of it."""
        if self.why_whole:
            first, second = "colwise_gather_output", "rowwise_split_input"
            return dict.fromkeys(self.given, first) | dict.fromkeys(self.takers, second)
        replicated = dict.fromkeys(self.inside, "replicate")
        return dict.fromkeys([*self.given, *self.biases], "colwise") | replicated | dict.fromkeys(self.takers, "rowwise")


def head_count(features: int, operations: Iterable[Operation]) -> int | None:
    """Into how many heads features are split, by the sizes in the code; None where that is not clear."""
    found = set()
    for name, sizes, _ in operations:
        last, before = (sizes[-1], sizes[-2]) if len(sizes) > 1 else (None, None)
        if name not in _SPLITTING or name == "flatten":
            continue
        if last is not None and 1 < last < features and features % last == 0:
            found.add(features // last)
        elif last in (None, -1) and before is not None and 1 < before <= features and features % before == 0:
            found.add(before)
    return found.pop() if len(found) == 1 else None


def find_regions(flow: DataFlow, modules: Mapping[str, nn.Module]) -> list[Region]:
    """The pairs of linear layers in what was read of a block."""
    sources = {name: _by_source(trail) for name, trail in flow.inputs.items()}
    order = {name: number for number, name in enumerate(modules)}
    regions: list[Region] = []
    for name in sorted(sources, key=lambda name: order[name]):
        region = Region(takers=[name])
        taken = {each for other in regions for each in other.takers}
        if not is_linear(modules[name]) or not _trace_back(name, region, sources, modules) or region.given.keys() & taken:
            continue
        same = next((other for other in regions if other.given.keys() & region.given.keys()), None)
        if same is None:
            regions.append(region)
        else:
            same.takers.append(name)
            for mine, others in ((same.given, region.given), (same.biases, region.biases)):
                for source, operations in others.items():
                    mine[source] |= operations
            same.inside += [each for each in region.inside if each not in same.inside]
            same.foreign |= region.foreign
    for region in regions:
        region.given = {name: region.given[name] for name in sorted(region.given, key=lambda name: order[name])}
        region.why_whole = _why_whole(region, sources, flow, modules)
    return regions


def _trace_back(
    name: str,
    region: Region,
    sources: Mapping[str, dict[Source, set[Operation]]],
    modules: Mapping[str, nn.Module],
) -> bool:
    """Find where the input of a layer comes from; say whether all of it comes from linear layers."""
    for source, operations in sources[name].items():
        if source.kind != "module":
            region.foreign.add(source)
        elif is_linear(module := modules[source.name]) and source.name != region.takers[0]:
            region.given[source.name] |= operations
        elif isinstance(module, nn.Embedding):
            region.biases[source.name] |= operations
        elif _is_headwise(source.name, sources, modules):
            region.inside.append(source.name)
            for inner, before in sources[source.name].items():
                region.given[inner.name] |= before | operations
        else:
            return False
    return bool(region.given)


def _is_headwise(
    name: str, sources: Mapping[str, dict[Source, set[Operation]]], modules: Mapping[str, nn.Module]
) -> bool:
    """Whether a module has vectors of the size of a head only, and is given heads: a norm of queries or keys."""
    sizes = {tuple(parameter.shape) for parameter in modules[name].parameters()}
    for source, operations in sources.get(name, {}).items():
        if source.kind != "module" or not is_linear(layer := modules[source.name]):
            return False
        heads = head_count(layer.out_features, operations)
        if heads is None or sizes != {(layer.out_features // heads,)}:
            return False
    return bool(sources.get(name))


def _why_whole(
    region: Region,
    sources: Mapping[str, dict[Source, set[Operation]]],
    flow: DataFlow,
    modules: Mapping[str, nn.Module],
) -> str:
    """Why the layers between cannot work on parts of the features; empty where they can."""
    features = {name: modules[name].out_features for name in region.given}
    inputs = {modules[name].in_features for name in region.takers}
    widest, first = max((size, name) for name, size in features.items())
    if len(inputs) > 1 or widest > min(inputs):
        return f"{_short(first)} makes {widest} features for {min(inputs)} inputs: several projections in one"
    for name in region.given:
        others = [other for other, given in sources.items() if any(source.name == name for source in given)]
        if odd := [other for other in others if other not in (*region.takers, *region.inside)]:
            return f"{_short(name)} is used by {_short(odd[0])} too"
    entering = {source for name in region.given for source in sources.get(name, {}) if source.kind == "argument"}
    if odd := sorted(source.name for source in region.foreign if source.kind == "parameter" or source in entering):
        return f"{_short(odd[0])} is used between them"
    names = {operation.name for operation in set().union(*region.given.values(), *region.biases.values())}
    is_split = bool(names & _SPLITTING)
    if odd := sorted(names - (_HEADWISE if is_split else _ELEMENTWISE)):
        return f"between them there is {odd[0]!r}, which may mix features"
    if not is_split:
        returned = features.keys() & {source.name for source, _ in flow.returned}
        odd = [*region.biases, *(f"{name}, which is returned too," for name in returned)]
        return f"{_short(odd[0])} is used between them" if odd or set(features.values()) != inputs else ""
    heads = {name: head_count(size, region.given[name]) for name, size in features.items()}
    if unclear := [name for name, number in heads.items() if number is None]:
        return f"into how many heads {_short(unclear[0])} is split is not clear from the code"
    region.heads = {name: number for name, number in heads.items() if number is not None}
    if odd := [name for name in region.biases if modules[name].embedding_dim != max(region.heads.values())]:
        return f"{_short(odd[0])} is used between them"
    return ""


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def choose_tensor(
    model: nn.Module, config: TensorConfig, tree: Tree, calls: Calls, blocks: Iterable[str], num_ranks: int
) -> tuple[ParallelModule, ...]:
    """What is done to each module of a model so that `num_ranks` ranks share its matrix products.

    Args:
        model: Any module.
        config: What the user asked for.
        tree: Of the model.
        calls: Of the model.
        blocks: FQNs of its repeated blocks.
        num_ranks: Of the tensor axis.

    Raises:
        PlanError: There is nothing to divide, sizes do not divide, or the styles that were asked for do not fit.
    """
    choice = TensorChoice(model, config, tree, calls, blocks, num_ranks)
    choice.divide_pairs()
    choice.divide_vocabulary()
    choice.divide_experts()
    choice.take_plan_of_model()
    choice.take_plan_of_user()
    choice.check()
    choice.divide_logits()
    choice.divide_sequences()
    return choice.entries()


def tensor_splits(
    entries: Iterable[ParallelModule], modules: Mapping[str, nn.Module], num_ranks: int
) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """The parameters that are divided, by FQN, as in `PlannedParameter.splits`."""
    found = {}
    for entry in entries:
        module, style = modules[entry.fqn], entry.how.partition(",")[0]
        dims = SHARD_DIMS.get(style, {})
        if style == "colwise" and isinstance(module, nn.Embedding):
            dims = {"weight": 1}
        elif style == "experts":
            dims = dict.fromkeys(module._parameters, 0)
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                cuts = [(place.dim, parameter.device_mesh.size()) for place in parameter.placements if place.is_shard()]
            else:
                cuts = [(dims[name], num_ranks)] if name in dims and parameter is not None else []
            if cuts:
                found[f"{entry.fqn}.{name}".lstrip(".")] = tuple(("tensor", *cut) for cut in cuts)
    return found


class SequenceLayout:
    """Which modules of a block work on a part of the sequence, and which get all of it.

    Norms, and the code that adds to the residual, work on parts. A module in which layers are divided, and any other,
    gathers its input and splits its output again.

    Args:
        flow: Of the block.
        block: Its FQN.
        regions: Of the model.
        modules: Of the model.
        styles: Of its modules.
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
        regions = [region for region in regions if is_within(region.takers[0], block)]
        in_regions = {name for region in regions for name in region.names}
        self.norms = [
            name
            for name in flow.inputs
            if name not in in_regions and all(parameter.ndim == 1 for parameter in modules[name].parameters())
        ]
        outer = {above for norm in self.norms for above in enclosing(norm) if is_within(above, block)}
        self.on_parts = {block, *outer}
        """Modules whose code works on parts."""
        self.trails = [*(flow.inputs[norm] for norm in self.norms), flow.returned]
        self.problem = flow.problem or self._problem(flow)
        parts: dict[str, list[str]] = defaultdict(list)
        for name in flow.inputs:
            if name not in self.norms:
                parts[self._part(name)].append(name)
        for part, leaves in parts.items() if not self.problem else ():
            self._lay_out(part, leaves, regions, styles)

    def _problem(self, flow: DataFlow) -> str:
        """What the code does that a part of the sequence would change; empty if nothing."""
        for name in sorted(self.on_parts):
            if flow.sizes_read.get(name):
                return f"{name} reads the length of its input"
        for source, operation in sorted((step for trail in self.trails for step in trail), key=str):
            if source.kind == "parameter":
                return f"{source.name} is used outside a module of its own"
            if operation is None or operation.module not in self.on_parts:
                continue
            if operation.name not in _ELEMENTWISE | {"[number]"}:
                return f"in {operation.module} there is {operation.name!r}"
        return ""

    def _part(self, name: str) -> str:
        """The outermost module around a layer whose code gets the whole sequence; the layer itself if there is none."""
        inner = [each for each in (name, *enclosing(name)) if each not in self.on_parts]
        inside = [each for each in inner if any(is_within(each, outer) for outer in self.on_parts)]
        return inside[-1]

    def _lay_out(self, part: str, leaves: list[str], regions: list[Region], styles: Mapping[str, str]) -> None:
        """What a module does to get the whole sequence, and to give back a part of it."""
        between = {name for region in regions for name in (*region.given, *region.biases, *region.inside)}
        takers = {name for region in regions for name in region.takers if name in styles}
        steps = [(source.name, done) for trail in self.trails for source, done in trail if source.name in leaves]
        ends = {name for name, _ in steps} - between
        done_inside = {done.name for name, done in steps if name in ends and done is not None and is_within(done.module, part)}
        if part not in between or part in {name for region in regions for name in region.given}:
            self.more[part] += ["whole sequence"] if part not in takers else []
        if ends <= takers and done_inside <= _ELEMENTWISE | {"[number]"}:
            for name in ends:
                self.more[name].append("to sequence")
        elif ends:
            self.more[part].append("split output")


class TensorChoice:
    """The styles of a model's modules, in the making; see `choose_tensor`."""

    def __init__(
        self, model: nn.Module, config: TensorConfig, tree: Tree, calls: Calls, blocks: Iterable[str], num_ranks: int
    ) -> None:
        self.model, self.config, self.tree, self.calls, self.num_ranks = model, config, tree, calls, num_ranks
        self.modules = dict(model.named_modules())
        self.blocks = list(blocks)
        self.owners = tree.owners()
        self.styles: dict[str, str] = {}
        self.more: dict[str, list[str]] = defaultdict(list)
        """What else is done to a module, beside its style."""
        self.reasons: dict[str, str] = {}
        """Of styles, and why other modules are left as they are."""
        places = Places(model)
        self.flows = self._read_blocks(places)
        leaves = [self.modules[name] for name in self.blocks]
        self.outside = [read_flow(places, root, leaves) for root in calls.roots if self.tree.nodes[root].has_forward]
        self.regions = [each for flow in (*self.flows.values(), *self.outside) for each in find_regions(flow, self.modules)]

    def _read_blocks(self, places: Places) -> dict[str, DataFlow]:
        """How data flow in each block; those that are built alike are read once."""
        first_of: dict[object, str] = {}
        flows: dict[str, DataFlow] = {}
        for name in self.blocks:
            first = first_of.setdefault(_structure(self.modules[name]), name)
            flows[name] = read_flow(places, name) if first == name else flows[first].renamed(first, name)
            if flows[name].problem:
                self.reasons[name] = f"its code could not be followed: {flows[name].problem}"
        return flows

    def divide_pairs(self) -> None:
        """Divide linear layers in pairs, as the code allows."""
        for region in self.regions:
            layers = (*region.given, *region.biases, *region.takers)
            if self.styles.keys() & set(layers):
                continue
            problem = next((why for name in layers if (why := self._why_not(name))), "")
            if not problem and not region.why_whole:
                self._see_local_heads(region)
            if not problem and region.why_whole and any(self._size(*item) % self.num_ranks for item in region.styles().items()):
                problem = f"{region.why_whole}, and their sizes do not divide by {self.num_ranks}"
            if problem:
                self.reasons |= dict.fromkeys(layers, problem)
                continue
            self.styles |= region.styles()
            most = max(region.heads.values(), default=0)
            heads = f"{most // self.num_ranks} of {most} heads on each rank" if most else "a part of the features on each rank"
            self.reasons |= dict.fromkeys(region.styles(), region.why_whole or heads)

    def _see_local_heads(self, region: Region) -> None:
        """Let code that reads the number of heads see this rank's; where it cannot, let it see all features."""
        numbers = set(region.heads.values())
        reshapes = [each for given in region.given.values() for each in given if each.name in _SPLITTING - {"flatten"}]
        between = {outer for name in region.names for outer in enclosing(name) if is_within(outer, region.owner)}
        found = {name: size_attributes(self.modules[name], numbers) for name in sorted(between)}
        divides = any(each for _, each in found.values())
        attributes = [] if divides else [(name, key) for name, (keys, _) in found.items() for key in keys]
        if any(numbers & set(each.sizes) and -1 in each.sizes for each in reshapes) and not attributes:
            region.why_whole = "the code gives both the number of heads and -1 for a size"
            return
        for name, key in attributes:
            self.more[name].append(f"{key}={getattr(self.modules[name], key) // self.num_ranks}")
        if any(-1 not in each.sizes for each in reshapes):
            self.more[region.owner].append("local sizes")

    def divide_vocabulary(self) -> None:
        """Divide the tables of tokens, and the output matrices of their shape, by rows."""
        tables = {
            name: module
            for name, module in self.modules.items()
            if type(module).forward is nn.Embedding.forward and module.num_embeddings > 2 * module.embedding_dim
            and not any(is_within(name, block) for block in self.blocks)
        }
        shapes = {module.weight.shape for module in tables.values()}
        self.heads = [name for name, module in self.modules.items() if is_linear(module) and module.weight.shape in shapes]
        self.heads = [name for name in self.heads if name not in self.styles]
        for name in (*tables, *self.heads):
            module, rows = self.modules[name], self.modules[name].weight.shape[0]
            problem = self._why_not(name, tied=True)
            if rows % self.num_ranks:
                problem = f"{rows} rows do not divide by {self.num_ranks}"
            elif name in tables and (module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq):
                problem = "its gradient depends on which rows are looked up"
            self.reasons[name] = problem or f"{rows // self.num_ranks} of {rows} rows on each rank"
            if not problem:
                self.styles[name] = "embedding" if name in tables else "colwise_gather_output"
        for nodes in self.owners.values():  # all that is tied is divided, or nothing of it
            names = [node.fqn for node in nodes]
            if tables.keys() & set(names) and (whole := [name for name in names if name not in self.styles]):
                for name in self.styles.keys() & set(names):
                    del self.styles[name]
                    self.reasons[name] = f"tied to {whole[0]}, which is left as it is"

    def divide_logits(self) -> None:
        """Keep logits divided up to the loss, where that is asked for or the model computes it itself."""
        wanted = self.config.loss_parallel
        for name in self.heads:
            source = Source("module", name)
            used = [trail for flow in self.outside for trail in (flow.returned, *flow.inputs.values())]
            is_in_loss = any(source in _by_source(flow.in_loss) for flow in self.outside)
            is_used = any(source in _by_source(trail) for trail in used)
            if name in self.styles and (wanted is True or (wanted == "auto" and is_in_loss and not is_used)):
                self.styles[name] = "colwise"
                self.more[name].append("loss_parallel")
                self.reasons[name] += "; the loss is computed of divided logits"

    def divide_experts(self) -> None:
        """Give each rank some of the experts of each layer."""
        for node in self.tree.root.walk():
            if not looks_like_experts(node) or isinstance(node.module, nn.ModuleList):
                continue
            num_experts = num_experts_of(node)
            problem = why_not_divided(node, self.tree, self.calls)
            if not problem and num_experts % self.num_ranks:
                problem = f"{num_experts} experts do not divide by {self.num_ranks}"
            how = f"{num_experts // self.num_ranks} of {num_experts} experts on each rank; every rank has all tokens"
            self.reasons[node.fqn] = problem or how
            if not problem:
                self.styles[node.fqn] = "experts"

    def _why_not(self, name: str, *, tied: bool = False) -> str:
        """Why no style may be given to a module; empty where one may."""
        node, module = self.tree.nodes.get(name), self.modules[name]
        parameters = {key for key, parameter in module._parameters.items() if parameter is not None}
        if node is None or len(node.own) != len(parameters):
            return "some of its parameters are not sharded"
        if not tied and any(len(self.owners[key]) > 1 for key in node.own):
            return "its weight is tied to another"
        if any(f"{name}.{key}" in self.calls.foreign_reads for key in parameters):
            return "other code reads its weight"
        return ""

    def take_plan_of_model(self) -> None:
        """Take the plan that the model's class brings along (`tensor_plan`), or transformers' own."""
        ready = getattr(self.model, "tensor_plan", None)
        if isinstance(ready, Mapping):
            self._take(ready, f"the plan of {type(self.model).__name__}", required=False)
            return
        named = getattr(self.model, "tp_plan", None) or getattr(self.model, "_tp_plan", None)
        if not isinstance(named, Mapping):
            return
        found = {
            name: _TRANSFORMERS.get(style, "")
            for pattern, style in named.items()
            for fits in [name_matcher(pattern)]
            for name in self.modules
            if fits(name)
        }
        for region in self.regions:  # a pair of which one style has no translation is divided as its code allows
            if not all(found.get(name) for name in (*region.given, *region.takers)) or self._is_left(region):
                for name in region.names:
                    found.pop(name, None)
        for name, style in found.items():
            if style and not self._misfit(name, style) and (name in self.styles or self.reasons.get(name) is None):
                self.styles[name] = style
                self.reasons[name] = self.reasons.get(name) or "the plan of transformers"

    def _is_left(self, region: Region) -> bool:
        return any(name not in self.styles for name in (*region.given, *region.takers))

    def take_plan_of_user(self) -> None:
        """Take what `tensor.plan` says; the last pattern that matches a module wins.

        Raises:
            PlanError: A pattern matches nothing, or the style is unknown or does not fit the module.
        """
        self._take(self.config.plan, "named in tensor.plan", required=True)

    def _take(self, plan: Mapping[str, str], reason: str, *, required: bool) -> None:
        for pattern, style in plan.items():
            if style not in STYLES:
                raise PlanError(
                    f"tensor.plan asks for the style {style!r}",
                    where=f"tensor.plan: {pattern}",
                    why="; ".join(f"{name}: {what}" for name, what in STYLES.items()),
                    fix=fix_name(style, list(STYLES), "choose one of these"),
                )
            nodes = self.tree.matching(pattern)
            if not nodes and required:
                raise unknown_pattern(pattern, [name for name in self.modules if name], "tensor.plan")
            for node in nodes:
                self._set(node, style, reason, pattern)

    def _set(self, node: Node, style: str, reason: str, pattern: str) -> None:
        if style == "off":
            for inner in node.walk():
                if inner.keys and self.styles.pop(inner.fqn, None):
                    self.reasons[inner.fqn] = reason
                self.more.pop(inner.fqn, None)
            return
        if misfit := self._misfit(node.fqn, style):
            raise PlanError(
                f"{node.fqn!r} ({node.class_name}) cannot be {style!r}",
                where=f"tensor.plan: {pattern}",
                why=misfit,
                fix=f'name a layer that can, or leave it as it is: "{pattern}": "off"',
            )
        if self.styles.get(node.fqn) != style:
            self.more.pop(node.fqn, None)
            self.styles[node.fqn], self.reasons[node.fqn] = style, reason

    def _misfit(self, name: str, style: str) -> str:
        """Why a module cannot have a style; empty where it can."""
        module = self.modules[name]
        if style == "experts":
            return why_not_divided(self.tree.nodes[name], self.tree, self.calls)
        if why := self._why_not(name, tied=style in ("embedding", "colwise_gather_output")):
            return why
        if style in ("replicate", "sequence"):
            vectors = [parameter for parameter in module.parameters() if parameter.ndim == 1]
            return "" if vectors and len(vectors) == len(list(module.parameters())) else "it is no norm: it has matrices"
        if style == "embedding":
            return "" if type(module).forward is nn.Embedding.forward else "it is no nn.Embedding"
        if isinstance(module, nn.Embedding) and style == "colwise":
            return ""
        return "" if is_linear(module) else "it is no nn.Linear, or computes in its own way"

    def check(self) -> None:
        """Raise unless styles fit each other and all sizes divide.

        Raises:
            PlanError: With the module, and the nearest size of the axis that works.
        """
        for region in self.regions:
            first, second = ("colwise", "rowwise")
            parts = [name for name in region.given if self.styles.get(name) == first]
            parts += [name for name in region.takers if self.styles.get(name) == second]
            whole = [name for name in (*region.given, *region.takers) if name not in parts]
            if parts and whole:
                raise PlanError(
                    f"{parts[0]!r} is {self.styles[parts[0]]!r}, but {whole[0]!r} is {self.styles.get(whole[0], 'off')!r}",
                    where=f"tensor.plan: {whole[0]}",
                    why="one computes with a part of the features that the other makes or takes as a whole",
                    fix="give all of them colwise and rowwise, or colwise_gather_output and rowwise_split_input, or off: "
                    + ", ".join((*region.given, *region.takers)),
                )
        heads = {name: number for region in self.regions for name, number in region.heads.items()}
        sizes = {name: (heads[name], "heads") if name in heads and style == "colwise" else (self._size(name, style), "features")
                 for name, style in self.styles.items() if style not in ("replicate", "sequence")}
        if not sizes:
            raise self._nothing_found()
        if odd := [name for name, (size, _) in sizes.items() if size % self.num_ranks]:
            common = math.gcd(*(size for size, _ in sizes.values()))
            works = [size for size in range(1, common + 1) if common % size == 0]
            nearest = min(works, key=lambda size: (abs(size - self.num_ranks), size))
            raise PlanError(
                f"{odd[0]!r} has {sizes[odd[0]][0]} {sizes[odd[0]][1]}, which {self.num_ranks} ranks cannot share evenly",
                where=f"mesh.tensor, {odd[0]}",
                why="each rank of the tensor axis computes as many heads or features of a layer",
                fix=f"set mesh.tensor = {nearest}, or leave these layers as they are: {self._off(odd[0])}",
            )

    def _off(self, name: str) -> str:
        """What to type so that a layer, and those that go with it, is left as it is."""
        region = next((each for each in self.regions if name in each.names), None)
        names = [name] if region is None else [region.owner] if region.owner not in ("", *self.blocks) else region.names
        patterns = dict.fromkeys(re.sub(r"\b\d+\b", "*", each) for each in names)
        return "tensor.plan = {" + ", ".join(f'"{pattern}": "off"' for pattern in patterns) + "}"

    def _size(self, name: str, style: str) -> int:
        """What a style divides of a module."""
        module: Any = self.modules[name]
        if style == "experts":
            return num_experts_of(self.tree.nodes[name])
        if isinstance(module, nn.Embedding):
            return module.num_embeddings if style == "embedding" else module.embedding_dim
        return module.in_features if style.startswith("rowwise") else module.out_features

    def _nothing_found(self) -> PlanError:
        reasons = [f"{name}: {why}" for name, why in self.reasons.items()][:4]
        return PlanError(
            f"the mesh axis 'tensor' has {self.num_ranks} ranks, but {type(self.model).__name__} has no layers to divide",
            where="mesh.tensor",
            why="; ".join(reasons) or "no linear layer takes the output of others alone",
            fix='name them: TensorConfig(plan={"*.up": "colwise", "*.down": "rowwise"}), or set mesh.tensor = 1',
        )

    def divide_sequences(self) -> None:
        """Let norms and residuals of blocks work on parts of each sequence, where that is asked for and the code allows.

        Raises:
            PlanError: `tensor.sequence` is true, and no block can.
        """
        asked = {name for name, style in self.styles.items() if style == "sequence"}
        wanted = self.config.sequence is True or (self.config.sequence == "auto" and bool(asked))
        for name in asked:
            del self.styles[name]
        runs: dict[str, list[str]] = defaultdict(list)
        for name in self.blocks if wanted else ():
            runs[name.rpartition(".")[0]].append(name)
        problems, is_divided = {}, False
        for names in runs.values():
            if not any(is_within(name, block) for name in self.styles for block in names):
                continue
            layouts = [SequenceLayout(self.flows[name], name, self.regions, self.modules, self.styles) for name in names]
            problem = next((each.problem for each in layouts if each.problem), "") or self._between(names)
            if problem:
                problems |= dict.fromkeys(names, f"sequences stay whole: {problem}")
                continue
            for layout in layouts:
                self.styles |= dict.fromkeys(layout.norms, "sequence")
                for name, what in layout.more.items():
                    self.more[name] += what
            is_divided = True
            self.more[names[0]].append("split sequence")
            self.more[names[-1]].append("join sequence")
        if self.config.sequence is True and not is_divided:
            raise PlanError(
                f"no block of {type(self.model).__name__} can work on parts of sequences",
                where="tensor.sequence",
                why="; ".join(dict.fromkeys(problems.values())) or "it has no repeated blocks with divided layers",
                fix="set tensor.sequence = auto",
            )
        self.reasons = {**problems, **self.reasons}

    def _between(self, names: list[str]) -> str:
        """What happens to the output of one block before the next gets it, if anything."""
        for flow in self.outside:
            for source, operation in (step for name in names for step in flow.inputs.get(name, ())):
                if source.name in names and operation is not None and operation.name != "[number]":
                    return f"between blocks there is {operation.name!r}"
        return ""

    def entries(self) -> tuple[ParallelModule, ...]:
        """What was chosen, in the model's order."""
        made = []
        for name, module in self.modules.items():
            if isinstance(module, nn.Linear) and name not in self.styles and any(is_within(name, each) for each in self.blocks):
                self.reasons.setdefault(name, "no other linear layer takes its output alone")
        if self.config.verify:
            self.more[""].append(VERIFY)
            self.reasons[""] = "the first forward is compared with one on whole tensors"
        for name in self.modules:
            how = ", ".join([*([self.styles[name]] if name in self.styles else []), *dict.fromkeys(self.more.get(name, ()))])
            if how or name in self.reasons:
                made.append(ParallelModule(fqn=name, how=how, reason=self.reasons.get(name, "")))
        return tuple(made)


def _structure(module: nn.Module) -> object:
    """Equal for modules that are built alike."""
    return tuple(
        (name, type(inner), tuple((key, tuple(p.shape)) for key, p in inner._parameters.items() if p is not None))
        for name, inner in module.named_modules()
    )
