"""Tensor parallel styles of modules, with reasons, and why other modules are not split.

Linear layers are split in pairs: the first by its outputs (`colwise`), the second by its inputs (`rowwise`), so that
a rank computes its own features, or heads, between the two. If the code between them needs all features, the first
gathers its output and the second takes its part of its input, which is correct for any code in between.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.config.schema import TensorConfig
from shardwise.errors import PlanError, fix_name
from shardwise.planning.calls import Calls, Places, enclosing, is_within
from shardwise.planning.experts import common_divisors, looks_like_experts, num_experts_of, why_not_divided
from shardwise.planning.groups import Tree, name_matcher, unknown_pattern
from shardwise.planning.plan import ParallelModule
from shardwise.planning.regions import (
    Region,
    SequenceRegions,
    by_source,
    computes_linear,
    find_regions,
    is_linear,
    layer_sizes,
)
from shardwise.planning.source.flow import read_flow, size_attributes
from shardwise.planning.source.values import Source

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
"""Styles, by their names in `tensor.plan`."""
SHARD_DIMS = {
    "colwise": {"weight": 0, "bias": 0},
    "colwise_gather_output": {"weight": 0, "bias": 0},
    "rowwise": {"weight": 1},
    "rowwise_split_input": {"weight": 1},
    "embedding": {"weight": 0},
}
"""Split dimension of each parameter by style; other parameters are replicated."""
_TRANSFORMERS = {
    **{style: style for style in ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")},
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "replicate",
    "moe_tp_experts": "experts",
}
"""Styles by transformers' names."""
DIVIDED = "divided already"
"""Entry of a module that the user has split."""
VERIFY = "verify"
"""Entry of a model whose first forward is compared with one on unsharded tensors."""


def choose_tensor(
    model: nn.Module, config: TensorConfig, tree: Tree, calls: Calls, blocks: Iterable[str], num_ranks: int
) -> tuple[ParallelModule, ...]:
    """Return the style of each module, so that `num_ranks` ranks share the matrix products.

    Args:
        model: Any module.
        config: Tensor parallel settings.
        tree: Module tree of the model.
        calls: Calls between its modules.
        blocks: FQNs of its repeated blocks.
        num_ranks: Number of ranks of the tensor axis.

    Raises:
        PlanError: There is nothing to split, sizes are not divisible, requested styles do not fit, or layers have
            adapters.
    """
    if adapted := next((name for name, module in model.named_modules() if hasattr(module, "lora_A")), None):
        raise PlanError(
            f"{adapted!r} has an adapter, and the mesh a tensor axis ({num_ranks} ranks)",
            where=f"mesh.tensor, {adapted}",
            why="layers with adapters are not split",
            fix="set mesh.tensor = 1 and give its ranks to shard",
        )
    choice = TensorChoice(model, config, tree, calls, blocks, num_ranks)
    choice.divide_pairs()
    choice.divide_vocabulary()
    choice.divide_experts()
    choice.take_plan_of_model()
    choice.take_plan(config.plan, "named in tensor.plan", is_required=True)
    choice.check()
    choice.divide_logits()
    choice.divide_sequences()
    return choice.entries()


def tensor_splits(
    entries: Iterable[ParallelModule], modules: Mapping[str, nn.Module], num_ranks: int
) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """Return the splits of parameters by FQN, as in `PlannedParameter.splits`."""
    found = {}
    for entry in entries:
        module, style = modules[entry.fqn], entry.how.partition(",")[0]
        dims = SHARD_DIMS.get(style, {})
        if style == "experts" or (style == "colwise" and isinstance(module, nn.Embedding)):
            dims = dict.fromkeys(module._parameters, 0 if style == "experts" else 1)
        elif dims and not isinstance(module, nn.Linear | nn.Embedding):  # Conv1D, whose weight is (inputs, outputs)
            dims = dims | {"weight": 1 - dims["weight"]}
        for name, parameter in module._parameters.items():
            splits = [("tensor", dims[name], num_ranks)] if name in dims and parameter is not None else []
            if isinstance(parameter, DTensor):
                places = [place.dim for place in parameter.placements if isinstance(place, Shard)]
                splits = [("tensor", dim, parameter.device_mesh.size()) for dim in places]
            if splits:
                found[f"{entry.fqn}.{name}".lstrip(".")] = tuple(splits)
    return found


class TensorChoice:
    """State of `choose_tensor`: the styles chosen so far."""

    def __init__(
        self, model: nn.Module, config: TensorConfig, tree: Tree, calls: Calls, blocks: Iterable[str], num_ranks: int
    ) -> None:
        self.model, self.config, self.tree, self.calls, self.num_ranks = model, config, tree, calls, num_ranks
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.blocks = list(blocks)
        self.owners = tree.owners()
        self.styles: dict[str, str] = {}
        self.more: dict[str, list[str]] = defaultdict(list)
        """Additional styles of a module."""
        self.reasons: dict[str, str] = {}
        """Reasons for styles, and for modules without one."""
        self.heads: list[str] = []
        """Output matrices."""
        places, blocks = Places(model), [self.modules[name] for name in self.blocks]
        self.flows = {name: read_flow(places, name) for name in self.blocks}
        problems = {name: flow.problem for name, flow in self.flows.items() if flow.problem}
        self.reasons |= {name: f"its code could not be followed: {problem}" for name, problem in problems.items()}
        self.outside = [read_flow(places, root, blocks) for root in calls.roots if tree.nodes[root].has_forward]
        flows = (*self.flows.values(), *self.outside)
        self.regions = [region for flow in flows for region in find_regions(flow, self.modules)]

    def divide_pairs(self) -> None:
        """Split linear layers in pairs where the code allows it."""
        for region in self.regions:
            problem = next((why for name in region.layers if (why := self._why_not(name))), "")
            if not problem and not region.why_whole and self._local_heads(region) is None:
                region.why_whole = "the code gives both the number of heads and -1 for a size"
            if region.why_whole and any(self._size(*each) % self.num_ranks for each in region.styles().items()):
                problem = problem or f"{region.why_whole}, and their sizes do not divide by {self.num_ranks}"
            most = max(region.heads.values(), default=0)
            part = f"{most // self.num_ranks} of {most} heads" if most else "a part of the features"
            self.reasons |= dict.fromkeys(region.styles(), problem or region.why_whole or f"{part} on each rank")
            self.styles |= region.styles() if not problem else {}

    def _local_heads(self, region: Region) -> dict[str, list[str]] | None:
        """Return the additional styles for code that reads the number of heads; None if none would work."""
        numbers, more = set(region.heads.values()), defaultdict(list)
        between = {outer for name in region.layers for outer in enclosing(name) if is_within(outer, region.owner)}
        found = {name: size_attributes(self.modules[name], numbers) for name in sorted(between)}
        if not any(divides for _, divides in found.values()):
            for name, keys in ((name, keys) for name, (keys, _) in found.items() if keys):
                more[name] += [f"{key}={getattr(self.modules[name], key) // self.num_ranks}" for key in keys]
        if not more and any(numbers & set(each.sizes) and -1 in each.sizes for each in region.reshapes):
            return None
        if any(-1 not in each.sizes for each in region.reshapes):
            more[region.owner].append("local sizes")
        return more

    def divide_vocabulary(self) -> None:
        """Split embeddings, and output matrices of their shape, by rows."""
        free = {name: each for name, each in self.modules.items() if not self._is_in_block(name)}
        tables = {name: each for name, each in free.items() if type(each).forward is nn.Embedding.forward}
        tables = {name: each for name, each in tables.items() if each.num_embeddings > 2 * each.embedding_dim}
        shapes = [table.weight.shape for table in tables.values()]
        matrices = [name for name, each in free.items() if is_linear(each) and each.weight.shape in shapes]
        self.heads = [name for name in matrices if name not in self.styles]
        for name in (*tables, *self.heads):
            module, problem = self.modules[name], self._why_not(name, tied=True)
            rows = module.weight.shape[0]
            if rows % self.num_ranks:
                problem = f"{rows} rows do not divide by {self.num_ranks}"
            elif name in tables and (module.padding_idx is not None or module.max_norm or module.scale_grad_by_freq):
                problem = "its gradient depends on which rows are looked up"
            self.reasons[name] = problem or f"{rows // self.num_ranks} of {rows} rows on each rank"
            if not problem:
                self.styles[name] = "embedding" if name in tables else "colwise_gather_output"
        self._leave_tied()

    def _leave_tied(self) -> None:
        """Leave a module unsplit if its weight is tied to that of an unsplit module."""
        while (found := self._half_divided()) is not None:
            name, whole = found
            del self.styles[name]
            self.reasons[name] = f"tied to {whole}, which is left as it is"

    def _half_divided(self) -> tuple[str, str] | None:
        """Return a split module and an unsplit one with the same weight, if any."""
        for names in ([node.fqn for node in nodes] for nodes in self.owners.values()):
            divided = [name for name in names if name in self.styles]
            if divided and len(divided) < len(names):
                return divided[0], next(name for name in names if name not in divided)
        return None

    def divide_logits(self) -> None:
        """Keep logits split up to the loss, if requested or if the model computes its loss itself."""
        wanted = self.config.loss_parallel
        in_loss = {source for flow in self.outside for source in by_source(flow.in_loss)}
        used = {
            source for flow in self.outside for trail in (flow.returned, *flow.inputs.values()) for source, _ in trail
        }
        for name in (name for name in self.heads if name in self.styles):
            if wanted is True or (wanted == "auto" and Source("module", name) in in_loss - used):
                self.styles[name] = "colwise"
                self.more[name].append("loss_parallel")
                self.reasons[name] += "; the loss is computed of divided logits"

    def divide_experts(self) -> None:
        """Split the experts of each layer over the ranks."""
        for node in self.tree.root.walk():
            if looks_like_experts(node) and not isinstance(node.module, nn.ModuleList):
                num_experts, problem = num_experts_of(node), why_not_divided(node, self.tree, self.calls)
                if not problem and num_experts % self.num_ranks:
                    problem = f"{num_experts} experts do not divide by {self.num_ranks}"
                part = f"{num_experts // self.num_ranks} of {num_experts} experts on each rank"
                self.reasons[node.fqn] = problem or f"{part}; every rank has all tokens"
                self.styles |= {node.fqn: "experts"} if not problem else {}

    def _is_in_block(self, name: str) -> bool:
        return any(is_within(name, block) for block in self.blocks)

    def _why_not(self, name: str, *, tied: bool = False) -> str:
        """Return why a module can have no style; empty if it can."""
        node = self.tree.nodes[name]
        parameters = [key for key, parameter in node.module._parameters.items() if parameter is not None]
        if len(node.own) != len(parameters):
            return "some of its parameters are not sharded"
        if not tied and any(len(self.owners[key]) > 1 for key in node.own):
            return "its weight is tied to another"
        is_read = any(f"{name}.{key}" in self.calls.foreign_reads for key in parameters)
        return "other code reads its weight" if is_read else ""

    def take_plan_of_model(self) -> None:
        """Apply the plan of the model's class (`tensor_plan`), or the plan of transformers."""
        ready = getattr(self.model, "tensor_plan", None)
        named = getattr(self.model, "tp_plan", None) or getattr(self.model, "_tp_plan", None)
        if isinstance(ready, Mapping):
            self.take_plan(ready, f"the plan of {type(self.model).__name__}", is_required=False)
        if isinstance(ready, Mapping) or not isinstance(named, Mapping):
            return
        fits = [(name_matcher(pattern), _TRANSFORMERS.get(style, "")) for pattern, style in named.items()]
        found = {name: style for fit, style in fits for name in self.modules if fit(name)}
        for region in self.regions:  # a pair with an untranslated style is split as its code allows
            if any(not found.get(name) or name not in self.styles for name in (*region.given, *region.takers)):
                found = {name: style for name, style in found.items() if name not in region.styles()}
        for name, style in found.items():
            if not style or self._misfit(name, style) or self.styles.get(name) == style:
                continue
            if name in self.styles or name not in self.reasons:
                self.styles[name], self.reasons[name] = style, "the plan of transformers"
        self._leave_tied()

    def take_plan(self, plan: Mapping[str, str], reason: str, *, is_required: bool) -> None:
        """Set styles of modules by patterns; the last matching pattern wins.

        Raises:
            PlanError: A pattern that is required matches nothing, or the style is unknown or does not fit the module.
        """
        for pattern, style in plan.items():
            where, nodes = f"tensor.plan: {pattern}", self.tree.matching(pattern)
            if style not in STYLES:
                why = "; ".join(f"{name}: {what}" for name, what in STYLES.items())
                fix = fix_name(style, list(STYLES), "choose one of these")
                raise PlanError(f"tensor.plan asks for the style {style!r}", where=where, why=why, fix=fix)
            if not nodes and is_required:
                raise unknown_pattern(pattern, [name for name in self.modules if name], "tensor.plan")
            for node in nodes if style != "off" else ():
                if misfit := self._misfit(node.fqn, style):
                    fix = f'name a layer that can, or leave it as it is: "{pattern}": "off"'
                    what = f"{node.fqn!r} ({node.class_name}) cannot be {style!r}"
                    raise PlanError(what, where=where, why=misfit, fix=fix)
                if self.styles.get(node.fqn) != style:
                    self.styles[node.fqn], self.reasons[node.fqn] = style, reason
            for inner in (inner for node in nodes for inner in node.walk()) if style == "off" else ():
                if self.styles.pop(inner.fqn, None):
                    self.reasons[inner.fqn] = reason

    def _misfit(self, name: str, style: str) -> str:
        """Return why a module cannot have a style; empty if it can."""
        module = self.modules[name]
        is_table = type(module).forward is nn.Embedding.forward
        if style == "experts":
            return why_not_divided(self.tree.nodes[name], self.tree, self.calls)
        if style in ("replicate", "sequence"):
            is_norm = {parameter.ndim for parameter in module.parameters()} == {1}
            return "" if is_norm else "it is no norm, which has vectors only"
        if style == "embedding" and not is_table:
            return "it is no nn.Embedding"
        if style != "embedding" and not is_linear(module) and not (is_table and style == "colwise"):
            return "it is no nn.Linear, or computes in its own way"
        return self._why_not(name, tied=style in ("embedding", "colwise_gather_output"))

    def check(self) -> None:
        """Raise unless styles are compatible and all sizes are divisible.

        Raises:
            PlanError: With the module, and the nearest size of the axis that works.
        """
        for region in self.regions:
            layers = [*region.given, *region.takers]
            parts = [name for name in layers if self.styles.get(name) in ("colwise", "rowwise")]
            if parts and (whole := [name for name in layers if name not in parts]):
                raise PlanError(
                    f"{parts[0]!r} is {self.styles[parts[0]]}, but {whole[0]!r} is {self.styles.get(whole[0], 'off')}",
                    where=f"tensor.plan: {whole[0]}",
                    why="one computes with a part of the features that the other makes or takes as a whole",
                    fix="give all of them colwise and rowwise, or colwise_gather_output and rowwise_split_input, or "
                    f"off: {', '.join(layers)}",
                )
        if (found := self._half_divided()) is not None:
            raise PlanError(
                f"{found[0]!r} is {self.styles[found[0]]}, but {found[1]!r} is off",
                where=f"tensor.plan: {found[1]}",
                why="they have one weight",
                fix="set a style for both, or off for both",
            )
        heads = {name: number for region in self.regions for name, number in region.heads.items()}
        divided = {name: style for name, style in self.styles.items() if style not in ("replicate", "sequence")}
        sizes = {name: self._size(name, style) for name, style in divided.items()}
        sizes |= {name: number for name, number in heads.items() if divided.get(name) == "colwise"}
        if not sizes:
            raise self._nothing_found()
        if odd := next((name for name, size in sizes.items() if size % self.num_ranks), None):
            nearest, *_ = common_divisors(sizes.values(), self.num_ranks)
            what = "heads" if odd in heads else "features"
            raise PlanError(
                f"{odd!r} has {sizes[odd]} {what}, which {self.num_ranks} ranks cannot share evenly",
                where=f"mesh.tensor, {odd}",
                why="each rank of the tensor axis computes the same number of heads or features of a layer",
                fix=f"set mesh.tensor = {nearest}, or leave these layers as they are: {self._off(odd)}",
            )

    def _off(self, name: str) -> str:
        """Return the setting that leaves a layer and its related layers unsplit."""
        region = next((each for each in self.regions if name in each.layers), Region(takers=[name]))
        names = [region.owner] if region.owner not in ("", *self.blocks) and region.given else region.layers
        patterns = dict.fromkeys(re.sub(r"\b\d+\b", "*", each) for each in names)
        return "tensor.plan = {" + ", ".join(f'"{pattern}": "off"' for pattern in patterns) + "}"

    def _size(self, name: str, style: str) -> int:
        """Return the size of a module that a style splits."""
        module = self.modules[name]
        if style == "experts":
            return num_experts_of(self.tree.nodes[name])
        if isinstance(module, nn.Embedding):
            return module.num_embeddings if style == "embedding" else module.embedding_dim
        return layer_sizes(module)[0 if style.startswith("rowwise") else 1]

    def _nothing_found(self) -> PlanError:
        reasons = [f"{name}: {why}" for name, why in self.reasons.items()][:4]
        name = type(self.model).__name__
        return PlanError(
            f"the mesh axis 'tensor' has {self.num_ranks} ranks, but {name} has no layers to split",
            where="mesh.tensor",
            why="; ".join(reasons) or "no linear layer takes the output of others alone",
            fix='name them: TensorConfig(plan={"*.up": "colwise", "*.down": "rowwise"}), or set mesh.tensor = 1',
        )

    def divide_sequences(self) -> None:
        """Split the sequences of norms and residuals in blocks, if requested and the code allows it.

        Raises:
            PlanError: `tensor.sequence` is true, but no block supports it.
        """
        asked = [name for name, style in self.styles.items() if style == "sequence"]
        wanted = self.config.sequence is True or (self.config.sequence == "auto" and bool(asked))
        for name in asked:
            del self.styles[name]
        runs: dict[str, list[str]] = defaultdict(list)
        for name in self.blocks if wanted else ():
            if any(is_within(divided, name) for divided in self.styles):
                runs[name.rpartition(".")[0]].append(name)
        problems: dict[str, str] = {}
        for names in runs.values():
            facts = (self.regions, self.modules, dict(self.styles))
            layouts = [SequenceRegions(self.flows[name], name, *facts) for name in names]
            problem = next((layout.problem for layout in layouts if layout.problem), "") or self._between(names)
            problems |= dict.fromkeys(names, f"sequences stay whole: {problem}") if problem else {}
            for layout in layouts if not problem else ():
                self.styles |= dict.fromkeys(layout.norms, "sequence")
                for name, what in layout.more.items():
                    self.more[name] += what
            if not problem:
                self.more[names[0]].append("split sequence")
                self.more[names[-1]].append("join sequence")
        if self.config.sequence is True and len(problems) == sum(map(len, runs.values())):
            raise PlanError(
                f"no block of {type(self.model).__name__} can work on parts of sequences",
                where="tensor.sequence",
                why="; ".join(dict.fromkeys(problems.values())) or "it has no repeated blocks with divided layers",
                fix="set tensor.sequence = auto",
            )
        self.reasons = problems | self.reasons

    def _between(self, names: list[str]) -> str:
        """Return the operations on the output of one block before the next block, if any."""
        steps = (step for flow in self.outside for name in names for step in flow.inputs.get(name, ()))
        found = [done.name for source, done in steps if source.name in names and done is not None]
        return next((f"between blocks there is {name!r}" for name in found if name != "[number]"), "")

    def entries(self) -> tuple[ParallelModule, ...]:
        """Return the chosen entries, in the model's order."""
        for region in self.regions:
            if all(self.styles.get(name) == "rowwise" for name in region.takers):
                for name, what in (self._local_heads(region) or {}).items():
                    self.more[name] += what
        for name, module in self.modules.items():
            if computes_linear(module) and self._is_in_block(name):
                self.reasons.setdefault(name, "no other linear layer takes its output alone")
        if self.config.verify:
            self.more[""].append(VERIFY)
            self.reasons.setdefault("", "the first forward is compared with one on whole tensors")
        made = []
        for name in self.modules:
            how = [*filter(None, [self.styles.get(name)]), *dict.fromkeys(self.more.get(name, ()))]
            if how or name in self.reasons:
                made.append(ParallelModule(fqn=name, how=", ".join(how), reason=self.reasons.get(name, "")))
        return tuple(made)
