"""Trace a model's attention as markers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.trace.latent import LATENTS, is_smaller, mark_latent
from topw_deploy.export.trace.marker import mark_attention
from topw_deploy.export.trace.masks import MaskPlaceholders
from topw_deploy.export.trace.own_attention import adapted
from topw_deploy.export.trace.relative import BIASES, with_sinks
from topw_deploy.export.trace.sparse import SELECTIONS

_IMPLEMENTATION = "topw_marker"
# Arguments without effect in causal inference.
_HARMLESS = {
    "dropout",
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "logits_to_keep",
}


@contextlib.contextmanager
def marked(model: PreTrainedModel) -> Iterator[None]:
    """Trace attention of `model` as markers inside the block."""
    masks, layers = MaskPlaceholders(), _Layers(model)
    AttentionInterface.register(_IMPLEMENTATION, partial(_marker_attention, masks, layers))
    AttentionMaskInterface.register(_IMPLEMENTATION, masks.make)
    before = model.config._attn_implementation
    model.set_attn_implementation(_IMPLEMENTATION)
    # Models outside the attention interface ignore that call, but create masks through the mask interface.
    model.config._attn_implementation_internal = _IMPLEMENTATION
    try:
        with adapted(model):
            yield
    finally:
        model.set_attn_implementation(before)
        model.config._attn_implementation_internal = before


class _Layers:
    """Numbers attention calls: a layer's first call gets its index, further calls get numbers after the last layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._next = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._seen: set[int] = set()

    def number(self, module: torch.nn.Module) -> int:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if layer in self._seen:
            layer = self._next
        self._next = max(self._next, layer + 1)
        self._seen.add(layer)
        return layer


def _marker_attention(
    masks: MaskPlaceholders,
    layers: _Layers,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    blocks: tuple[torch.Tensor, int] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Stand in for an attention function of transformers.

    The mask alone decides which keys are visible, as in transformers' eager and sdpa functions; `sliding_window` is for
    functions without a mask, and is ignored. `blocks` are a second key per token, which is its value too, and their
    stride (see `marker`).
    """
    relative = None
    if hasattr(module, BIASES):
        relative, s_aux = with_sinks(others.pop("position_bias"), others.pop("sinks", None))
    known = _HARMLESS | SELECTIONS
    unknown = sorted(name for name, given in others.items() if name not in known and given is not None)
    visible = masks.visible(attention_mask)
    if visible is None or unknown or is_causal is False or not getattr(module, "is_causal", True):
        what = f"the attention argument {unknown[0]}" if unknown else "attention that is not causal"
        what = "an attention mask of its own" if visible is None else what
        raise UnsupportedModelError(
            f"{type(module).__name__} uses {what}, which the export does not support; "
            "choose another model or graft an ONNX decoder made by another exporter."
        )
    layer, scale = layers.number(module), query.shape[-1] ** -0.5 if scaling is None else scaling
    if hasattr(module, LATENTS) and is_smaller(module, query.shape[1]):
        return mark_latent(module, query, layer=layer, scale=scale, visible=visible, sink=s_aux), None
    if blocks is None:
        output = mark_attention(
            query,
            key,
            value,
            layer=layer,
            scale=scale,
            softcap=softcap or 0.0,
            visible=visible,
            sink=s_aux,
            relative=relative,
        )
    else:
        output = mark_attention(
            query,
            torch.cat((key, blocks[0]), dim=-1),
            None,
            layer=layer,
            scale=scale,
            visible=visible,
            sink=s_aux,
            latent=key.shape[-1],
            stride=blocks[1],
        )
    return output, None
