"""Causal attention over sequences with several documents: a dense mask, or flex_attention on GPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from shardwise import compat

AttentionMask = Tensor | BlockMask


def document_mask(document_ids: Tensor, dtype: torch.dtype, query_positions: Tensor | None = None) -> AttentionMask:
    """Return the mask of visible positions: those of the query's document up to itself.

    On GPUs it is a `BlockMask`, whose memory grows with the number of blocks of 128 x 128 positions. Elsewhere it is a
    dense tensor to add to the scores, because flex_attention has no backward on CPUs. Pass `query_positions` if the
    rank has only a part of the queries (context parallelism).
    """
    length = document_ids.shape[1]
    keys = torch.arange(length, device=document_ids.device)
    queries = keys if query_positions is None else query_positions
    if compat.can_compile(document_ids.device):
        return block_mask(queries, length, document_ids)
    seen = (document_ids[:, queries, None] == document_ids[:, None, :]) & (keys <= queries[:, None])
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf).unsqueeze(1)


def block_mask(queries: Tensor, length: int, document_ids: Tensor | None = None) -> BlockMask:
    """A causal mask of queries at these positions of a sequence, within documents if `document_ids` is given."""

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_past = key <= queries[query]
        return (
            is_past if document_ids is None else is_past & (document_ids[row, queries[query]] == document_ids[row, key])
        )

    num_rows = None if document_ids is None else document_ids.shape[0]
    return _compiled(create_block_mask, queries.device.type)(
        is_seen, num_rows, None, len(queries), length, queries.device
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask | None) -> Tensor:
    """Attention of grouped query heads (batch, heads, length, head dim); causal without a mask."""
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    if isinstance(mask, BlockMask):
        return block_sparse_attention(query, key, value, mask)
    groups = query.shape[1] // key.shape[1]  # kernels with a mask need as many key heads as query heads
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))


def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None = None
) -> Tensor:
    """`flex_attention`; like scaled_dot_product_attention, context parallelism replaces it while a block runs."""
    attention = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention, query.device.type)
    return attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)  # pyrefly: ignore[bad-return]


@functools.cache
def _compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Compile the function: in eager mode flex_attention computes all scores, and create_block_mask a dense mask."""
    return torch.compile(function)
