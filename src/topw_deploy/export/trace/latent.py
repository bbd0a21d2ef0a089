"""Latent attention: keys and values expanded from one compressed vector per token.

The states hold the compressed vectors. Queries and outputs absorb the expansion:

    q · (U_k c, r) = (U_k^T q_c, q_r) · (c, r)        sum of w U_v c = U_v (sum of w c)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topw_deploy.export.trace.marker import mark_attention
from topw_deploy.export.trace.masks import Visible

LATENTS = "topw_latents"  # attribute of a module: this call's compressed vectors and rotated keys


def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, heads, sequence, dim] of kv_nope [batch, 1, sequence, rank] and rotated keys k_rot.

    Replaces the method of that name, and stores its arguments on the module for `mark_latent`.
    """
    widths = [self.qk_nope_head_dim, self.v_head_dim]
    both = self.kv_b_proj(kv_nope.squeeze(1)).unflatten(-1, (-1, sum(widths))).transpose(1, 2)
    key, value = torch.split(both, widths, dim=-1)
    setattr(self, LATENTS, (kv_nope, k_rot))
    return torch.cat((key, k_rot.expand(-1, key.shape[1], -1, -1)), dim=-1), value


def is_smaller(self: Any, heads: int) -> bool:
    """Whether the compressed vectors take less memory than the keys and values."""
    expanded = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
    return bool(self.kv_lora_rank + self.qk_rope_head_dim < expanded)


def mark_latent(self: Any, query: Tensor, *, layer: int, scale: float, visible: Visible, sink: Tensor | None) -> Tensor:
    """Mark attention of `query` [batch, heads, sequence, dim]. Returns [batch, sequence, heads, value_dim]."""
    compressed, rotated = getattr(self, LATENTS)
    delattr(self, LATENTS)
    rank, plain = compressed.shape[-1], self.qk_nope_head_dim
    up = self.kv_b_proj.weight.unflatten(0, (query.shape[1], -1))  # [heads, plain + value_dim, rank]
    absorbed = torch.matmul(query[..., :plain], up[:, :plain])
    output = mark_attention(
        torch.cat((absorbed, query[..., plain:]), dim=-1),
        torch.cat((compressed, rotated), dim=-1),
        None,
        layer=layer,
        scale=scale,
        visible=visible,
        sink=sink,
        latent=rank,
    )
    values = torch.matmul(output.transpose(1, 2), up[:, plain:].transpose(1, 2))
    return values.transpose(1, 2)
