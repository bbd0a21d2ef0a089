"""Trace a model's attention as placeholders, through transformers' interfaces of attention and of masks.

While a model is traced, each mask is a placeholder tensor that is recognised by its identity, or None if the model
accepts None for "all keys up to the query". So the masks show which keys a query sees.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.source.text_decoder import replaced
from topw_deploy.export.trace import attention_adapters
from topw_deploy.export.trace.attention_adapters import (
    BIASES,
    LATENTS,
    Method,
    expand_kv,
    keep_all_columns,
    latents_are_smaller,
    mark_latent_attention,
    model_function,
    move_sinks_to_biases,
    rotate_pairs,
    split_heads,
    update_cache,
)
from topw_deploy.export.trace.placeholders import Visible, mark_attention, untraceable

_IMPLEMENTATION = "topw_placeholder"
_UNNUMBERED = {"openai.Attention"}  # classes of attention without layer_idx
_NEED_A_MASK = {"mpt"}  # model types that fail if a mask is None
_SELECTIONS = {"indices", "block_indices"}  # arguments of attention functions that carry selected tokens
# Arguments of attention functions that have no effect in causal inference.
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
def marked_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make the attention of `model` leave placeholders inside the block."""
    masks, layers = MaskPlaceholders(), _LayerNumbers(model)
    AttentionInterface.register(_IMPLEMENTATION, partial(_mark_call, masks, layers))
    AttentionMaskInterface.register(_IMPLEMENTATION, masks.make)
    before = model.config._attn_implementation
    model.set_attn_implementation(_IMPLEMENTATION)
    # Models outside the attention interface ignore that call, but create masks through the mask interface.
    model.config._attn_implementation_internal = _IMPLEMENTATION
    try:
        with adapted_attention(model):
            yield
    finally:
        model.set_attn_implementation(before)
        model.config._attn_implementation_internal = before


def adapted_attention(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replace the methods and functions that this module and `attention_adapters` list, inside the block."""
    last_numbers: dict[str, int] = {}
    changes: list[tuple[Any, str, Any]] = []
    for module in model.modules():
        path, kind = type(module).__module__.split("."), type(module).__name__
        if path[:2] != ["transformers", "models"]:
            continue
        name, file = f"{path[2]}.{kind}", sys.modules[type(module).__module__]
        functions = {**attention_adapters.FUNCTIONS, **FUNCTIONS}.get(name, {})
        changes += [(file, function, replacement) for function, replacement in functions.items()]
        methods = dict({**attention_adapters.METHODS, **METHODS}.get(name, {}))
        if hasattr(module, "expand_kv"):
            methods["expand_kv"] = expand_kv
        if hasattr(module, "_maybe_slice_kv_shared_inputs"):
            methods["_maybe_slice_kv_shared_inputs"] = keep_all_columns
        if _is_indexer(module):
            methods["forward"] = _select_nothing
        changes += [(module, attribute, MethodType(method, module)) for attribute, method in methods.items()]
        if name in _UNNUMBERED:
            last_numbers[name] = last_numbers.get(name, -1) + 1
            changes.append((module, "layer_idx", last_numbers[name]))
    return replaced(*changes)


class _LayerNumbers:
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


def _mark_call(
    masks: MaskPlaceholders,
    layers: _LayerNumbers,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    blocks: tuple[Tensor, int] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Leave a placeholder in place of a call of an attention function of transformers.

    The mask alone decides which keys are visible, as in transformers' eager and sdpa functions. `sliding_window` is for
    functions that read no mask, and is ignored.
    s_aux: the sink of `mark_attention`.
    blocks: a second key per token, which is its own value, [batch, 1, sequence, dim]; and the placeholder's stride.
    Returns the output [batch, sequence, heads, value_dim], and None for the attention weights.
    """
    relative = None
    if hasattr(module, BIASES):
        relative, s_aux = move_sinks_to_biases(others.pop("position_bias"), others.pop("sinks", None))
    known = _HARMLESS | _SELECTIONS
    unknown = sorted(name for name, given in others.items() if name not in known and given is not None)
    visible = masks.visible(attention_mask)
    if visible is None or unknown or is_causal is False or not getattr(module, "is_causal", True):
        feature = f"the attention argument {unknown[0]}" if unknown else "attention that is not causal"
        feature = "an attention mask of its own" if visible is None else feature
        raise untraceable(f"{type(module).__name__} uses {feature}, which the export does not support")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mark = partial(
        mark_attention,
        layer=layers.number(module),
        scale=scale,
        softcap=softcap or 0.0,
        visible=visible,
        sink=s_aux,
        relative=relative,
    )
    latents = vars(module).pop(LATENTS, None)
    if latents is not None and latents_are_smaller(module, query.shape[1]):
        return mark_latent_attention(module, query, latents, mark), None
    if blocks is None:
        return mark(query, key, value), None
    second_keys, stride = blocks
    return mark(query, torch.cat((key, second_keys), dim=-1), None, latent=key.shape[-1], stride=stride), None


class MaskPlaceholders:
    """Creates placeholders for masks (`make`), and knows which keys each one shows (`visible`)."""

    def __init__(self) -> None:
        self._placeholders: list[tuple[Tensor, Visible]] = []

    def make(
        self,
        *_args: Any,
        mask_function: Callable[..., Any],
        config: Any = None,
        allow_is_causal_skip: bool = True,
        **_others: Any,
    ) -> Tensor | None:
        """The placeholder of a mask, bool [1, 1, 1, 1]; a function of transformers' mask interface.

        Returns None for "all keys up to the query" if the model accepts it.
        Raises UnsupportedModelError for a mask that depends on more than positions, or shows later tokens.
        """
        visible = _visible_keys(mask_function)
        if visible == Visible() and allow_is_causal_skip and getattr(config, "model_type", "") not in _NEED_A_MASK:
            return None
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool)
        self._placeholders.append((mask, visible))
        return mask

    def visible(self, mask: Tensor | None) -> Visible | None:
        """The keys that `mask` shows; None for a mask that is not one of the placeholders."""
        if mask is None:
            return Visible()
        return next((visible for placeholder, visible in self._placeholders if placeholder is mask), None)


def _visible_keys(mask_function: Callable[..., Any]) -> Visible:
    """The keys that transformers' `mask_function` shows. Raises as `MaskPlaceholders.make` does."""
    limits = {"window": 0, "chunk": 0}
    is_causal = False
    for part in _combined_functions(mask_function):
        name, variables = part.__qualname__.split(".")[0], inspect.getclosurevars(part).nonlocals
        if part is masking_utils.causal_mask_function:
            is_causal = True
        elif name == "sliding_window_overlay":
            limits["window"] = int(variables["sliding_window"])
        elif name == "chunked_overlay":
            limits["chunk"] = int(variables["chunk_size"])
        elif not name.startswith(("bidirectional", "sliding_window_bidirectional")):
            raise untraceable(f"the model's attention mask depends on more than positions ({name})")
    if not is_causal:
        raise UnsupportedModelError(
            "the model's attention sees later tokens, so it is not a causal decoder; choose a decoder-only language "
            "model."
        )
    return Visible(**limits)


def _combined_functions(mask_function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The functions that transformers' `and_masks` combined to `mask_function`; itself if it is no combination."""
    if mask_function.__qualname__.split(".")[0] != "and_masks":
        return [mask_function]
    combined = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    return [part for each in combined for part in _combined_functions(each)]


# Some models attend to selected tokens: by an indexer (DeepSeek V3.2 and V4, GLM 5, MiniMax M3, Qwen 4) or by a score
# of each key (Doge). Up to a certain length such a model selects all tokens. The export attends to all tokens, and its
# context ends at that length.


def _is_indexer(module: torch.nn.Module) -> bool:
    """Whether the forward of `module` selects tokens."""
    return type(module).__name__.endswith("Indexer") and _selected_tokens(module) is not None


def dense_tokens(model: torch.nn.Module) -> int | None:
    """The length, in tokens, of the longest sequence of which every layer selects all tokens.

    None for a model that does not select tokens.
    """
    by_score = "keep_window_size"  # an attribute of Doge's attention
    selecting = (module for module in model.modules() if _is_indexer(module) or hasattr(module, by_score))
    counts = map(_selected_tokens, selecting)
    return min((tokens for tokens in counts if tokens is not None), default=None)


def _select_nothing(_self: Any, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """A selection [batch, sequence, 1] that nothing reads; replaces the forward of an indexer."""
    return torch.zeros((*hidden_states.shape[:2], 1), dtype=torch.int32)


def _selected_tokens(module: torch.nn.Module) -> int | None:
    """The longest sequence, in tokens, of which `module` selects all tokens; None if it selects none."""
    blocks, size = getattr(module, "topk_blocks", None), getattr(module, "block_size", None)
    if isinstance(blocks, int) and isinstance(size, int):
        return blocks * size
    budget, ratio = getattr(module, "token_budget", None), getattr(module, "compress_ratio", None)
    if isinstance(budget, int) and isinstance(ratio, int):
        return budget + ratio - 1  # selects whole blocks, and always the tokens after the last complete one
    tokens = getattr(module, "index_topk", getattr(module, "keep_window_size", None))
    block = getattr(module, "compress_rate", 1)  # selects complete blocks of this many tokens
    if not isinstance(tokens, int):
        return None
    return (tokens + 1) * block - 1 if block > 1 else tokens


# BLOOM, MPT and Falcon.


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi's slopes [heads] in BLOOM and Falcon.

    The powers of 2^(-8/n), with n the largest power of two <= heads; then every second power of 2^(-4/n).
    """
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * power / below) for power in range(1, below + 1)]
    slopes += [2 ** (-4 * power / below) for power in range(1, 2 * (heads - below) + 1, 2)]
    return torch.tensor(slopes)


def mpt_slopes(heads: int) -> Tensor:
    """ALiBi's slopes [heads] in MPT.

    The powers of 2^(-8/n), with n the smallest power of two >= heads. If n > heads, every second power comes first, and
    the list is cut to `heads`.
    """
    above = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-8 * power / above) for power in range(1, above + 1)]
    return torch.tensor(slopes if above == heads else (slopes[1::2] + slopes[::2])[:heads])


def _attend(self: Any, cache: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any) -> Tensor:
    """Leave a placeholder for the module `self`. Returns [batch, sequence, heads * value_dim].

    query, key, value: [batch, heads or kv_heads, sequence, dim].
    options: of `mark_attention`.
    """
    key, value = update_cache(cache, key, value, self.layer_idx)
    return mark_attention(query, key, value, layer=self.layer_idx, scale=scale, **options).flatten(2)


def _heads(self: Any, hidden_states: Tensor, heads: int, *projections: str) -> Iterator[Tensor]:
    """The results of the module's linear layers `projections`, [batch, heads, sequence, head_dim] each."""
    return (split_heads(getattr(self, name)(hidden_states), heads) for name in projections)


def _bloom_attention(
    self: Any, hidden_states: Tensor, residual: Tensor, layer_past: Any = None, **_: Any
) -> tuple[Tensor, None]:
    fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
    query, key, value = (fused[..., part, :].transpose(1, 2) for part in range(3))
    slopes = alibi_slopes(self.num_heads)
    output = _attend(self, layer_past, query, key, value, self.inv_norm_factor, slopes=slopes)
    return self.dense(output) + residual, None


def _mpt_attention(self: Any, hidden_states: Tensor, past_key_values: Any = None, **_: Any) -> tuple[Tensor, None]:
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (split_heads(part, self.n_heads) for part in mixed.chunk(3, dim=2))
    slopes = mpt_slopes(self.n_heads)
    output = _attend(self, past_key_values, query, key, value, self.softmax_scale, slopes=slopes)
    return self.out_proj(output), None


def _falcon_attention(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    layer_past: Any = None,
    position_embeddings: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    query, key, value = _split_falcon_heads(self, self.query_key_value(hidden_states))
    slopes = None
    if alibi is None:
        query, key = model_function(self, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    else:  # Falcon rounds slopes, positions and their products to bfloat16, and scales them with the scores
        slopes = alibi_slopes(self.num_heads).to(torch.bfloat16)
    return self.dense(_attend(self, layer_past, query, key, value, self.inv_norm_factor, slopes=slopes)), None


def _split_falcon_heads(self: Any, fused: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values [batch, heads or kv_heads, sequence, head_dim] of Falcon's fused projection."""
    if not self.new_decoder_architecture and self.multi_query:
        heads = fused.unflatten(-1, (self.num_heads + 2, self.head_dim)).transpose(1, 2)
        return heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    groups = self.num_kv_heads
    grouped = fused.unflatten(-1, (groups, self.num_heads // groups + 2, self.head_dim))
    query = grouped[..., :-2, :].flatten(2, 3)
    return tuple(part.transpose(1, 2) for part in (query, grouped[..., -2, :], grouped[..., -1, :]))


# GPT-J and CodeGen rotate pairs, with tables of all positions.


def _gptj_attention(
    self: Any, hidden_states: Tensor, layer_past: Any = None, position_ids: Any = None, **_: Any
) -> Any:
    query, key, value = _heads(self, hidden_states, self.num_attention_heads, "q_proj", "k_proj", "v_proj")
    return _mark_rotated_attention(self, query, key, value, layer_past, position_ids)


def _codegen_attention(
    self: Any, hidden_states: Tensor, layer_past: Any = None, position_ids: Any = None, **_: Any
) -> Any:
    # The projection has four blocks, each with its share of queries, values and keys.
    blocks = self.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))
    parts = (blocks[..., part, :].flatten(2) for part in (0, 2, 1))
    query, key, value = (split_heads(part, self.num_attention_heads) for part in parts)
    return _mark_rotated_attention(self, query, key, value, layer_past, position_ids)


def _mark_rotated_attention(
    self: Any, query: Tensor, key: Tensor, value: Tensor, cache: Any, position_ids: Tensor
) -> tuple[Tensor, None]:
    """Rotate queries and keys [batch, heads, sequence, head_dim] by the positions, and leave a placeholder."""
    width = self.rotary_dim or self.head_dim
    table_width = self.pos_embd_dim  # decides GPT-J's frequencies
    frequencies = 1.0 / (10000 ** (torch.arange(0, table_width, 2, dtype=torch.int64) / table_width))
    angles = position_ids[..., None].float() * frequencies
    query, key = (rotate_pairs(part, angles, width) for part in (query, key))
    return self.out_proj(_attend(self, cache, query, key, value, 1 / self.scale_attn)), None


# GIT's mask differs from a causal one only for the tokens of images, which the export has not.


def _git_attention(self: Any, hidden_states: Tensor, _mask: Any = None, past_key_values: Any = None, **_: Any) -> Any:
    query, key, value = _heads(self, hidden_states, self.num_attention_heads, "query", "key", "value")
    return _attend(self, past_key_values, query, key, value, self.attention_head_size**-0.5), None


def _no_mask(**_: Any) -> None:
    """No mask; replaces the function that makes GIT's mask, which `_git_attention` does not read."""


# GPT-Neo, GPT-NeoX Japanese and OpenAI GPT compute attention in a method `_attn`.


def _gpt_neo_attention(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    visible = Visible(window=self.config.window_size if self.attention_type == "local" else 0)
    output = mark_attention(query, key, value, layer=self.layer_id, scale=1.0, visible=visible)
    return output.transpose(1, 2), None


def _gpt_neox_japanese_attention(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    output = mark_attention(query, key, value, layer=self.layer_idx, scale=1 / self.norm_factor)
    return output.transpose(1, 2), None


def _openai_gpt_attention(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    scale = value.shape[-1] ** -0.5 if self.scale else 1.0
    output = mark_attention(query, key.transpose(2, 3), value, layer=self.layer_idx, scale=scale)
    return [output.transpose(1, 2)]


# XGLM.


def _xglm_attention(self: Any, hidden_states: Tensor, past_key_values: Any = None, **_: Any) -> tuple[Tensor, None]:
    query, key, value = _heads(self, hidden_states, self.num_heads, "q_proj", "k_proj", "v_proj")
    return self.out_proj(_attend(self, past_key_values, query, key, value, self.scaling)), None


# Folder in transformers.models and class -> replaced methods.
METHODS: dict[str, dict[str, Method]] = {
    "bloom.BloomAttention": {"forward": _bloom_attention},
    "codegen.CodeGenAttention": {"forward": _codegen_attention},
    "falcon.FalconAttention": {"forward": _falcon_attention},
    "git.GitSelfAttention": {"forward": _git_attention},
    "gpt_neo.GPTNeoSelfAttention": {"_attn": _gpt_neo_attention},
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": {"_attn": _gpt_neox_japanese_attention},
    "gptj.GPTJAttention": {"forward": _gptj_attention},
    "mpt.MptAttention": {"forward": _mpt_attention},
    "openai.Attention": {"_attn": _openai_gpt_attention},
    "xglm.XGLMAttention": {"forward": _xglm_attention},
}
# The same -> replaced functions of the Python module that defines the class.
FUNCTIONS: dict[str, dict[str, Method]] = {"git.GitModel": {"create_causal_mask": _no_mask}}
