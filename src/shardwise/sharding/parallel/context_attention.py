"""Attention over sequences split over the mesh axis `context`, and the layout of these sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from shardwise import compat
from shardwise.distributed.mesh import default_mesh, sub_mesh
from shardwise.errors import ConfigError
from shardwise.models import attention

_TOKENS = ("input_ids", "inputs_embeds", "tokens", "x")


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Assignment of sequence positions to the ranks of the context axis.

    A sequence on n ranks has n chunks, or 2n if balanced: rank i has chunks i and 2n - 1 - i. With a causal mask, later
    positions attend to more keys than earlier ones; balancing gives all ranks the same amount of computation.
    """

    num_ranks: int
    rank: int
    balanced: bool = True

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a sequence, over all ranks."""
        return self.num_ranks * (2 if self.balanced else 1)

    def chunks(self, rank: int | None = None) -> tuple[int, ...]:
        """Return the chunks of a rank (default: this one), in local order."""
        rank = self.rank if rank is None else rank
        return (rank, self.num_chunks - 1 - rank) if self.balanced else (rank,)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of `length` tokens.

        Raises:
            ConfigError: The length cannot be split over the ranks.
        """
        size, rest = divmod(length, self.num_chunks)
        if rest or not size:
            fitting = max(length // self.num_chunks, 1) * self.num_chunks
            raise ConfigError(
                f"sequences of {length} tokens cannot be divided into {self.num_chunks} chunks",
                where="sequence length" if dist.is_initialized() else "data.sequence_length",
                why=f"the context axis has {self.num_ranks} ranks"
                + (", each of which gets two chunks of equal length (context.balanced)" if self.balanced else ""),
                fix=f"use sequences of {fitting} tokens, or a smaller mesh.context",
            )
        first = torch.arange(size, device=device)
        return torch.cat([first + chunk * size for chunk in self.chunks()])

    def in_order(self, gathered: Tensor) -> Tensor:
        """Reorder parts of all ranks, concatenated along dim 0, to sequence order."""
        if not self.balanced:
            return gathered
        held = [chunk for rank in range(self.num_ranks) for chunk in self.chunks(rank)]
        places = [held.index(chunk) for chunk in range(self.num_chunks)]
        return gathered.unflatten(0, (self.num_chunks, -1))[places].flatten(0, 1)


def split_sequences(
    batch: Mapping[str, Any], *, mesh: DeviceMesh | None = None, balanced: bool = True
) -> dict[str, Any]:
    """Return this rank's part of each sequence in a batch, along the mesh axis `context`.

    All tensors with the sequence as second dimension (tokens, labels, document ids, a two-dimensional attention mask)
    are split the same way, and `position_ids` are added if absent. All ranks of a context group must pass the same
    batch. Labels must already be shifted, so that `labels[i]` follows `input_ids[i]`; for a transformers model with
    unshifted `labels`, they are shifted across the ranks.

    Args:
        batch: Tensors (rows, length, ...) by name; other values are returned unchanged.
        mesh: Mesh of the model. Without a context axis the batch is returned unchanged.
        balanced: As in `ShardConfig.context`.

    Returns:
        The batch for the model and the loss.

    Raises:
        ConfigError: The length cannot be split over the axis, or the batch has no sequences.

    Ranks:
        Local.
    """
    axis = sub_mesh(mesh or default_mesh(), ("context",))
    if axis is None:
        return dict(batch)
    layout = SequenceLayout(axis.size(), axis.get_local_rank(), balanced)
    tokens = tokens_of(batch)
    length = tokens.shape[1]
    positions = layout.positions(length, tokens.device)

    def part(value: Any) -> Any:
        is_sequence = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == length
        return value.index_select(1, positions.to(value.device)) if is_sequence else value

    parts = {name: part(value) for name, value in batch.items()}
    if "position_ids" not in parts:
        parts["position_ids"] = positions.expand(tokens.shape[0], -1)
    return parts


def tokens_of(batch: Mapping[str, Any]) -> Tensor:
    """Return the tensor that determines the sequence length."""
    named = [batch[name] for name in _TOKENS if isinstance(batch.get(name), Tensor)]
    found = next((value for value in (*named, *batch.values()) if isinstance(value, Tensor) and value.ndim >= 2), None)
    if found is None:
        raise ConfigError(
            f"the batch has no sequences: {', '.join(batch) or 'it is empty'}",
            where="split_sequences(batch)",
            why="sequences are tensors (rows, length, ...)",
            fix="pass the batch as a dict with `input_ids`",
        )
    return found


_PLAIN_ATTENTION = F.scaled_dot_product_attention
_PLAIN_BLOCK_SPARSE = attention.block_sparse_attention


class WrongAttention(Exception):
    """Attention that context parallelism does not support; the message says why."""


class _AllGather(torch.autograd.Function):
    """All-gather along dim 0; its gradient is summed over the ranks and scattered."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        part = part.contiguous()
        gathered = part.new_empty((part.shape[0] * dist.get_world_size(group), *part.shape[1:]))
        compat.all_gather_flat(gathered, part, group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        gradient = gradient.contiguous()
        part = gradient.new_empty((gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:]))
        compat.reduce_scatter_flat(part, gradient, ctx.group)
        return part, None


class WholeSequenceAttention:
    """`scaled_dot_product_attention` of this rank's queries with the keys and values of all ranks.

    Args:
        group: Process group of the context axis.
        layout: Layout of the sequences.
    """

    def __init__(self, group: dist.ProcessGroup, layout: SequenceLayout) -> None:
        self.group, self.layout = group, layout
        self.causal_masks: dict[int, BlockMask] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Return the attention output for this rank's queries.

        Raises:
            WrongAttention: Keys or mask do not match this rank's part of the sequence.
        """
        keys, values = self.gather_keys(query, key, value, attn_mask)
        if attn_mask is not None or not is_causal:
            return _PLAIN_ATTENTION(query, keys, values, attn_mask, dropout_p, **options)
        if not dropout_p and compat.can_compile(query.device):
            return _PLAIN_BLOCK_SPARSE(query, keys, values, self.causal_mask(query), options.get("scale"))
        chunks = self.layout.chunks()
        size = query.shape[-2] // len(chunks)
        rows = []
        for chunk, queries in zip(chunks, query.split(size, dim=-2), strict=True):
            end = (chunk + 1) * size  # later positions are masked
            mask = torch.ones(size, end, dtype=torch.bool, device=query.device).tril(end - size)
            rows.append(_PLAIN_ATTENTION(queries, keys[..., :end, :], values[..., :end, :], mask, dropout_p, **options))
        return torch.cat(rows, dim=-2)

    def causal_mask(self, query: Tensor) -> BlockMask:
        """Return the causal mask of this rank's queries, for flex_attention."""
        length = query.shape[-2]
        if length not in self.causal_masks:
            whole = length * self.layout.num_ranks
            self.causal_masks[length] = attention.block_mask(self.layout.positions(whole, query.device), whole)
        return self.causal_masks[length]

    def block_sparse(
        self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None = None
    ) -> Tensor:
        """Return the same output, computed by flex_attention."""
        return _PLAIN_BLOCK_SPARSE(query, *self.gather_keys(query, key, value, mask), mask, scale)

    def gather_keys(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all ranks, in sequence order."""
        local, num_chunks = query.shape[-2], len(self.layout.chunks())
        if key.shape[-2] != local:
            raise WrongAttention(f"attends from {local} positions to {key.shape[-2]}")
        if mask is not None and mask.shape[-1] != local * self.layout.num_ranks:
            raise WrongAttention(f"passes a mask of {mask.shape[-1]} keys, not {local * self.layout.num_ranks}")
        if local % num_chunks:
            raise WrongAttention(f"has {local} positions, which are not {num_chunks} chunks")
        if key.shape == value.shape:  # in one collective
            keys, values = self.gather(torch.stack([key, value]), -2)
            return keys, values
        return self.gather(key, -2), self.gather(value, -2)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """All-gather the tensor of the full sequence."""
        return self.layout.in_order(_AllGather.apply(part.movedim(dim, 0), self.group)).movedim(0, dim)

    def places(self, model: nn.Module) -> list[tuple[Any, str, Callable[..., Tensor]]]:
        """Return module, name and replacement of each attention function that the model's code uses."""
        attend = self.__call__  # one object, because compilers guard on its identity
        places: list[tuple[Any, str, Callable[..., Tensor]]] = [
            (F, "scaled_dot_product_attention", attend),
            (attention, "block_sparse_attention", self.block_sparse),
        ]
        sources = {type(module).__module__ for module in model.modules()} & sys.modules.keys()
        for source in sorted(sources):
            names = [name for name, value in vars(sys.modules[source]).items() if value is _PLAIN_ATTENTION]
            places += [(sys.modules[source], name, attend) for name in names]
        return places
