"""Account for every tensor of a checkpoint: the model reads it, it is part of another weight, or a rule ignores it.

Any other tensor is an error, because the exported model would silently differ from the one that was trained.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import SourceError
from topw_deploy.export.source.files import EncodedWeight, StoredTensor
from topw_deploy.export.source.resolve import MERGE_ADAPTER
from topw_deploy.manifest import IgnoredTensors, SourceTensors

_FLOATS = ("F64", "F32", "F16", "BF16")
_COMPARED_ROWS = 4096
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_ROTARY = re.compile(r"(^|[._])(original_)?inv_freq$|rotary_emb\.(cos|sin)_cached$")
_POSITIONS = re.compile(r"(^|\.)(position_ids|embed_positions\.(weights|_float_tensor))$")
_MASK = re.compile(r"(^|\.)((attn|attention|self_attention|crossattention)\.(bias|masked_bias)|causal_mask)$")
_DENSE_NORM = re.compile(r"\.post_mlp_layernorm\.weight$")
_PREDICTION = re.compile(r"(^|\.)mtp(\.|_)")
_TOWER = re.compile(
    r"(^|\.)(vision|visual|image|audio|speech|video|multi_modal|mm_projector|talker|token2wav|code2wav)\w*\."
)
_SHARED_KEYS = re.compile(r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
_INPUT_SCALE = re.compile(r"\.(input|output|activation)_(scale|zero_point)$|[._][qkv]_(scale|zero_point)$|\.kv_scale$")
_WEIGHT_SCALE = re.compile(r"scale(s|_inv|_2)?$|\.(qweight|qzeros|g_idx|absmax|quant_map|biases)$|zero_point$")
_ADAPTER = re.compile(r"(^|\.)(lora_|base_layer\.|modules_to_save\.)")
_PREDICTION_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The tensors of a checkpoint, and what a model took from them.

    stored: the tensors and decoded weights by name.
    parts: weight -> names of the tensors that it is decoded from.
    used: parameter or buffer -> names in `stored` that its values come from.
    unread: names in `stored` that the model did not take.
    missing: names of parameters for which nothing is stored.
    floats: the names in `used` of floating-point parameters.
    towers: prefixes of the parameters that do not belong to the text decoder.
    tied: names of parameters that are tied to another -> the other.
    dropped: transformers' patterns of names that a model of this class does not read.
    text: the text model's configuration.
    quantised: whether the configuration states a quantisation.
    cut: whether only the first layers were loaded.
    """

    stored: Mapping[str, StoredTensor | EncodedWeight]
    parts: Mapping[str, set[str]]
    used: Mapping[str, frozenset[str]]
    unread: set[str]
    missing: Sequence[str]
    floats: set[str]
    towers: tuple[str, ...]
    tied: Mapping[str, str]
    dropped: Collection[str]
    text: Any
    quantised: bool
    cut: bool

    def tied_name(self, name: str) -> str | None:
        """The tied parameter that the tensor `name` was stored for; None if there is none."""
        return next((key for key in self.tied if f".{key}".endswith(f".{name}") or name.endswith(f".{key}")), None)


def account(loaded: LoadedCheckpoint, folder: Path, model: str, notices: Sequence[str] = ()) -> SourceTensors:
    """Count what the model reads, merges and ignores.

    model: the class's name, for messages.
    notices: on the files, for messages.

    Raises SourceError for a missing tensor, for one that no rule allows to ignore, and for integers where the model has
    numbers.
    """
    _refuse_codes(loaded, folder)
    owners = [(name.startswith(loaded.towers), sources) for name, sources in loaded.used.items()]
    decoder = {source for is_tower, sources in owners if not is_tower for source in sources}
    towers = {source for is_tower, sources in owners if is_tower for source in sources} - decoder
    ignored: Counter[tuple[str, str]] = Counter()
    copies, refused = 0, []
    for name in sorted(towers | loaded.unread):
        rule = _TOWER_RULE if name in towers else next((rule for rule, holds in _RULES if holds(name, loaded)), None)
        if rule is not None:
            for part in loaded.parts.get(name, {name}):
                ignored[_NUMBER.sub("*", part), rule] += 1
        elif _is_copy(name, loaded):
            copies += 1
        else:
            refused.append(name)
    if loaded.missing:
        raise _missing_error(refused, loaded, folder, notices)
    if refused:
        raise _unread_error(refused, loaded, folder, model)
    joined = {source for sources in loaded.used.values() if len(sources) > 1 for source in sources}
    counts = {name: len(loaded.parts.get(name, {name})) for name in loaded.stored}
    merged = copies + sum(
        count for name, count in counts.items() if name not in towers | loaded.unread and (name in joined or count > 1)
    )
    return SourceTensors(
        read=sum(counts.values()) - merged - ignored.total(),
        merged=merged,
        ignored=tuple(IgnoredTensors(names, count, rule) for (names, rule), count in sorted(ignored.items())),
    )


def _refuse_codes(loaded: LoadedCheckpoint, folder: Path) -> None:
    """Raises SourceError for a parameter whose stored values are integers or float8, and thus lack their scales."""
    for name in sorted(source for key in loaded.floats for source in loaded.used[key]):
        tensor = loaded.stored[name]
        if isinstance(tensor, StoredTensor) and tensor.dtype not in _FLOATS:
            raise SourceError(
                f"the checkpoint in {folder} stores {name} as {tensor.dtype} {list(tensor.shape)}, but its "
                "configuration states no scales for it; restore the quantization_config of config.json, or export the "
                "unquantised model."
            )


def _missing_error(unread: list[str], loaded: LoadedCheckpoint, folder: Path, notices: Sequence[str]) -> SourceError:
    found = f", and {len(unread)} others are not read (first: {unread[0]})" if unread else ""
    others = "".join(f" ({notice})" for notice in notices)
    layers = [int(layer[1]) for layer in map(_LAYER.search, loaded.stored) if layer]
    missing = _LAYER.search(loaded.missing[0])
    advice = "fetch them again"
    if unread:
        advice = _advice(unread[0], loaded)
    elif missing and layers and int(missing[1]) > max(layers):
        advice = f"they have {max(layers) + 1} layers, but config.json states another number in num_hidden_layers"
    return SourceError(
        f"the weights in {folder} lack {len(loaded.missing)} tensors of the model (first: {loaded.missing[0]}){found}"
        f"{others}: {advice}."
    )


def _unread_error(names: list[str], loaded: LoadedCheckpoint, folder: Path, model: str) -> SourceError:
    name, tensor = names[0], loaded.stored[names[0]]
    kind = tensor.dtype if isinstance(tensor, StoredTensor) else "codes"
    others = f" and {len(names) - 1} other tensors" if len(names) > 1 else ""
    return SourceError(
        f"{model} does not read {name} ({kind} {list(tensor.shape)}){others} of the checkpoint in {folder}: "
        f"{_advice(name, loaded)}."
    )


def _advice(name: str, loaded: LoadedCheckpoint) -> str:
    """What to do about the tensor `name`, which the model does not read."""
    layers = getattr(loaded.text, "num_hidden_layers", None)
    layer = _LAYER.search(name)
    tied = loaded.tied_name(name)
    if _ADAPTER.search(name):
        return f"it belongs to an adapter, so merge that first: {MERGE_ADAPTER}"
    if tied is not None:
        return f"it differs from {loaded.tied[tied]}, to which config.json ties it; set tie_word_embeddings to false"
    if name.endswith("act.scales"):
        return "AWQ divides an activation by it, but this model has no such activation; export the unquantised model"
    if _WEIGHT_SCALE.search(name):
        return (
            "config.json states no quantisation that has it; restore its quantization_config, or export the "
            "unquantised model"
        )
    if layer is not None and layers is not None and int(layer[1]) >= layers:
        return f"config.json states num_hidden_layers {layers}; correct the number"
    if name.endswith(".bias"):
        return "config.json announces no such bias; correct it (attention_bias, mlp_bias), or its architecture"
    return "correct the architecture and the settings in config.json, or remove the tensor"


def _is_copy(name: str, loaded: LoadedCheckpoint) -> bool:
    """Whether the tensor equals the one to which the model ties its parameter."""
    tied = loaded.tied_name(name)
    if tied is None:
        return False
    sources = [source for source in loaded.used.get(tied, ()) if source != name]
    return all(_equal(loaded.stored[name], loaded.stored[source]) for source in sources)


def _equal(one: StoredTensor | EncodedWeight, other: StoredTensor | EncodedWeight) -> bool:
    if one == other or one.shape != other.shape:
        return one == other
    parts = (slice(start, start + _COMPARED_ROWS) for start in range(0, one.shape[0], _COMPARED_ROWS))
    return all(np.array_equal(_floats(one, rows), _floats(other, rows)) for rows in parts)


def _floats(tensor: StoredTensor | EncodedWeight, rows: slice) -> np.ndarray:
    return tensor.rows(rows) if isinstance(tensor, EncodedWeight) else tensor.array()[rows].astype(np.float32)


def _is_mask(name: str, loaded: LoadedCheckpoint) -> bool:
    shape = loaded.stored[name].shape
    square = len(shape) >= 3 and shape[-1] == shape[-2] and set(shape[:-2]) == {1}
    return _MASK.search(name) is not None and (np.prod(shape) == 1 if name.endswith("masked_bias") else square)


def _predicts_more(name: str, loaded: LoadedCheckpoint) -> bool:
    """Whether the tensor belongs to layers that predict later tokens.

    These follow the others. The configuration states their number, or transformers' class drops them by theirs.
    """
    layer, layers = _LAYER.search(name), getattr(loaded.text, "num_hidden_layers", None)
    counts = [getattr(loaded.text, count, None) or 0 for count in _PREDICTION_COUNTS]
    beyond = layer is not None and layers is not None and layers <= int(layer[1]) < layers + max(counts)
    numbered = [pattern for pattern in loaded.dropped if re.search(r"layers\\\.\d", pattern)]
    dropped = layer is not None and layers is not None and int(layer[1]) >= layers and _matches(name, numbered)
    return beyond or dropped or _PREDICTION.search(name) is not None


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _is_norm_of_dense_layer(name: str, loaded: LoadedCheckpoint) -> bool:
    """Whether the tensor is A.X K1's norm behind experts, in a layer that has none."""
    return _DENSE_NORM.search(name) is not None and _matches("mlp.post_mlp_layernorm", loaded.dropped)


def _is_beyond_cut(name: str, loaded: LoadedCheckpoint) -> bool:
    layer = _LAYER.search(name)
    return loaded.cut and layer is not None and int(layer[1]) >= loaded.text.num_hidden_layers


def _is_of_shared_layer(name: str, loaded: LoadedCheckpoint) -> bool:
    """Whether the tensor makes keys or values of a layer that uses another layer's."""
    layer, shared = _LAYER.search(name), getattr(loaded.text, "num_kv_shared_layers", None) or 0
    first = (getattr(loaded.text, "num_hidden_layers", None) or 0) - shared
    return bool(shared) and _SHARED_KEYS.search(name) is not None and layer is not None and int(layer[1]) >= first


def _is_zero_bias(name: str, loaded: LoadedCheckpoint) -> bool:
    tensor = loaded.stored[name]
    is_bias = name.endswith(".bias") and isinstance(tensor, StoredTensor) and len(tensor.shape) == 1
    return is_bias and not np.any(_floats(tensor, slice(None)))


_TOWER_RULE = "not of the text decoder"
INPUT_SCALES = "scale of activations or cache"
_RULES: tuple[tuple[str, Callable[[str, LoadedCheckpoint], bool]], ...] = (
    ("rotary frequencies", lambda name, _: _ROTARY.search(name) is not None),
    ("causal mask", _is_mask),
    ("positions", lambda name, _: _POSITIONS.search(name) is not None),
    (INPUT_SCALES, lambda name, loaded: loaded.quantised and bool(_INPUT_SCALE.search(name))),
    ("multi-token prediction", _predicts_more),
    ("layer that was cut off", _is_beyond_cut),
    (_TOWER_RULE, lambda name, _: _TOWER.search(name) is not None),
    ("keys and values of a layer that shares another's", _is_of_shared_layer),
    ("norm behind experts, in a layer without experts", _is_norm_of_dense_layer),
    ("bias of zeros", _is_zero_bias),
)
"""The reviewed list of tensors that a model may leave unread: the rule's name in the manifest, and whether it holds."""
