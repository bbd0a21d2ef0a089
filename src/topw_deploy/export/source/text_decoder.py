"""Read the configuration of a checkpoint, and take the text decoder out of a model that also reads images or audio.

transformers loads such a composite checkpoint as a whole. Its decoder then becomes part of a causal LM of the class
registered for the text configuration, of an equivalent class if the decoder has rotary sections (M-RoPE), or of the
class `TextDecoder`.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging as transformers_logging

from topw_deploy.errors import SourceError, UnsupportedModelError, one_line
from topw_deploy.export.source.files import SPECIAL_IDS, read_json, special_ids, text_part
from topw_deploy.export.source.quantised import quantised_format

# model_type of a text model with rotary sections for time, height and width -> the model_type of the causal LM that
# computes the same on text, and the settings that this LM needs.
_EQUAL_IN_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
# Text models that scale their logits when they stand alone, but not within a composite model.
_LOGITS_NOT_SCALED = {
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "granite": {"logits_scaling": 1.0},
}
_CLASS_FIELDS = ("model_type", "architectures", "transformers_version")
_SECTIONS = ("mrope_section", "mrope_interleaved")
_UNLIMITED = 65_536  # tokens: the context of a model without a limit; bounds the size of rotary tables
_LENGTH_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")
_UNLIMITED_TYPES = {"bloom", "xlstm"}  # bloom has ALiBi; xlstm is recurrent, but its configuration has no layer types
_BOUNDED_LAYERS = {"linear_attention", "sliding_attention"}
# RoPE types whose frequencies change beyond the original context; a graph holds only the original frequencies.
_SWITCHING_ROPE = {"longrope", "dynamic", "su"}
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Composite:
    """A model that has a text decoder among other parts.

    model: transformers' class of the whole model.
    config: the whole model's configuration.
    text: the configuration of the text part.
    """

    model: type[PreTrainedModel]
    config: Any
    text: Any

    @classmethod
    def of(cls, config: Any) -> Composite | None:
        """Return the composite model of `config`; None for a text model, or one that transformers cannot load whole."""
        if getattr(config, "is_encoder_decoder", False):
            return None
        text = config.get_text_config(decoder=True)
        if text is config:
            return None
        for mapping in (AutoModelForMultimodalLM._model_mapping, AutoModelForCausalLM._model_mapping):
            model = _registered_class(mapping, config)
            if model is not None:
                return cls(model, config, text)
        return None


class TextDecoder(PreTrainedModel):
    """A decoder and its output embeddings, as a causal LM."""

    base_model_prefix = "model"
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: Any, decoder: PreTrainedModel, head: torch.nn.Module) -> None:
        super().__init__(config)
        self.model, self.lm_head = decoder, head
        self._can_set_experts_implementation = decoder._can_set_experts_implementation  # type: ignore[method-assign]

    def forward(
        self,
        input_ids: torch.Tensor,  # [batch, sequence]
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,  # [batch, sequence]; each rotary section gets the same positions
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **_others: Any,
    ) -> CausalLMOutputWithPast:
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
        logits = self.lm_head(found.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)


def text_configuration(composite: Composite) -> Any:
    """The configuration of the causal LM that `text_decoder` returns."""
    text = copy.deepcopy(composite.text)
    if text.model_type in _EQUAL_IN_TEXT:
        equal, settings = _EQUAL_IN_TEXT[text.model_type]
        kind = CONFIG_MAPPING[equal]
        fields = {name: value for name, value in text.to_dict().items() if name not in _CLASS_FIELDS}
        rope = {name: value for name, value in text.rope_parameters.items() if name not in _SECTIONS}
        text = kind(**fields | {"rope_parameters": rope} | settings)
    for name, value in _LOGITS_NOT_SCALED.get(text.model_type, {}).items():
        setattr(text, name, value)
    text.tie_word_embeddings = bool(getattr(composite.config, "tie_word_embeddings", False))
    text.architectures = [_causal_class(text).__name__]
    return text


def text_decoder(composite: Composite, loaded: PreTrainedModel) -> PreTrainedModel:
    """Return the text decoder of the composite model `loaded` as a causal LM that shares the decoder's weights.

    loaded: an instance of `composite.model`.
    Raises UnsupportedModelError if the model has no text decoder or no output embeddings.
    """
    decoder = _decoder_in(composite, loaded)
    config = text_configuration(composite)
    kind = _causal_class(config)
    if type(decoder) is kind:  # Llama 4's decoder is already a causal LM
        return decoder.eval()
    head: Any = loaded.get_output_embeddings()
    path = _path_of(loaded, decoder)
    while head is None and path:  # the nearest `lm_head` around the decoder
        path = path.rpartition(".")[0]
        head = getattr(loaded.get_submodule(path), "lm_head", None)
    if head is None:
        raise UnsupportedModelError(
            f"{type(loaded).__name__} has no output embeddings for its text decoder {type(decoder).__name__}; "
            "choose a model that answers in text."
        )
    if kind is TextDecoder:
        return TextDecoder(config, decoder, head).eval()
    with torch.device("meta"):
        made: PreTrainedModel = kind._from_config(config, dtype=head.weight.dtype)  # type: ignore[arg-type]
    if type(made.base_model) is type(decoder):
        setattr(made, made.base_model_prefix, decoder)
    else:
        _share_parameters(decoder, made.base_model)
    made.set_output_embeddings(head)
    return made.eval()


def parts_left_out(composite: Composite, loaded: PreTrainedModel) -> list[str]:
    """Return the names of the outermost modules of `loaded` that do not belong to the text decoder."""
    decoder = _decoder_in(composite, loaded)
    path = _path_of(loaded, decoder)
    kept = {path, _path_of(loaded, loaded.get_output_embeddings())}
    above = {path.rsplit(".", count)[0] for count in range(1, path.count(".") + 1)} | {""}
    return [
        f"{place}.{name}".lstrip(".")
        for place, module in loaded.named_modules()
        if place in above
        for name, _ in module.named_children()
        if f"{place}.{name}".lstrip(".") not in kept | above
    ]


def has_rotary_sections(text: Any) -> bool:
    """Whether positions of image tokens have several coordinates (M-RoPE)."""
    return any(name in (getattr(text, "rope_parameters", None) or {}) for name in _SECTIONS)


def _causal_class(text: Any) -> type[PreTrainedModel]:
    return _registered_class(AutoModelForCausalLM._model_mapping, text) or TextDecoder


def _registered_class(mapping: Any, config: Any) -> type[PreTrainedModel] | None:
    """Return the model class registered for `config`; None if there is none, or if it takes only a part of `config`."""
    found: Any = mapping.get(type(config), None)
    return found if isinstance(found, type) and isinstance(config, getattr(found, "config_class", ())) else None


def _decoder_in(composite: Composite, loaded: PreTrainedModel) -> PreTrainedModel:
    """Return the outermost module that has the text configuration, without its output embeddings."""
    for module in loaded.modules():
        if isinstance(module, PreTrainedModel) and type(module.config) is type(composite.text):
            decoder = module.base_model
            if isinstance(decoder, PreTrainedModel):
                return decoder
    raise UnsupportedModelError(
        f"{type(loaded).__name__} has no module with its text configuration {type(composite.text).__name__}; "
        "choose a model with a text decoder of its own."
    )


def _path_of(loaded: PreTrainedModel, wanted: torch.nn.Module | None) -> str:
    """Return the dotted name of a module within `loaded`; "" if it is not there."""
    return next((name for name, module in loaded.named_modules() if module is wanted), "")


def _share_parameters(source: PreTrainedModel, target: torch.nn.Module) -> None:
    """Replace the parameters and buffers of `target` by those of `source`. Names and shapes must be the same."""
    given = dict(source.named_parameters())
    found = {**dict(source.named_buffers()), **given}
    needed = {**dict(target.named_buffers()), **dict(target.named_parameters())}
    for name in {**needed, **given}:
        shapes = [tuple(tensors[name].shape) if name in tensors else None for tensors in (found, needed)]
        if shapes[0] != shapes[1]:
            raise UnsupportedModelError(
                f"{name} has the shape {shapes[0]} in {type(source).__name__}, but {shapes[1]} in "
                f"{type(target).__name__}; report this model."
            )
        owner, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(owner), leaf, found[name])


_ABSENT = object()


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes inside the block.

    changes: (object, Python module or class, name, value). A class must have the attribute itself.
    """
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in changes]
    for change in changes:
        _set(*change)
    try:
        yield
    finally:
        for change in before:
            _set(*change)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, or delete it. An object's is set past its own `__setattr__`, as a module of torch has one."""
    if isinstance(owner, type):
        setattr(owner, name, value)
    elif value is _ABSENT:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


def allow_missing_packages() -> contextlib.AbstractContextManager[None]:
    """Inside the block, an image or audio tower whose package (timm) is not installed becomes an empty module."""
    make = AutoModel.from_config

    def from_config(config: Any, **settings: Any) -> Any:
        try:
            return make(config, **settings)
        except ImportError:
            return torch.nn.Module()

    return replaced((AutoModel, "from_config", staticmethod(from_config)))


def decoder_layers(model: PreTrainedModel) -> tuple[str, list[nn.Module]]:
    """Return the name of the list of a model's layers, and the layers; none if several lists or no list can be it."""
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    lists = [
        (name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    name, layers = lists[0] if lists else ("", ())
    return name, list(layers) if all(other.startswith(name) for other, _ in lists) else []


def load_config(folder: Path, num_hidden_layers: int | None = None, *, trust_remote_code: bool = False) -> Any:
    """Load the configuration in `folder`, cut to the first layers if `num_hidden_layers` is not None.

    Raises UnsupportedModelError unless it describes a supported causal decoder.
    """
    with silence_transformers():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        except Exception as error:
            _refuse_settings(folder, error)
            raise UnsupportedModelError(
                f"the installed transformers does not support the architecture of the configuration in {folder} "
                f"({one_line(error)}); models with their own code need --trust-remote-code."
            ) from error
    known = type(config) in AutoModelForCausalLM._model_mapping or Composite.of(config) is not None
    remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not known and not remote:
        raise UnsupportedModelError(
            f"the architecture {config.model_type!r} is not a causal language model in transformers; "
            "choose a decoder-only model."
        )
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            if quantised_format(folder) is None:
                raise UnsupportedModelError(
                    f"the checkpoint in {folder} is quantised, but its config.json does not say how; "
                    "export the unquantised one."
                )
            del part.quantization_config  # transformers then makes ordinary linear layers
    if getattr(config, "rescale_every", 0):
        config.rescale_every = 0  # RWKV for float16 halves weights in place, and activations; the logits stay the same
    if num_hidden_layers is not None:
        text = config.get_text_config(decoder=True)
        if num_hidden_layers > text.num_hidden_layers:
            raise UnsupportedModelError(
                f"num_hidden_layers is {num_hidden_layers}, but the model has {text.num_hidden_layers}; give at most "
                "that number.",
                "num_hidden_layers",
            )
        text.num_hidden_layers = num_hidden_layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:num_hidden_layers]
    return config


def _refuse_settings(folder: Path, error: Exception) -> None:
    """Raise SourceError if transformers refused the configuration in `folder` for a setting, not its architecture."""
    config = read_json(folder / "config.json")
    for part in (config, text_part(config)):
        for name in ("dtype", "torch_dtype"):
            if isinstance(part.get(name), str) and not isinstance(getattr(torch, part[name], None), torch.dtype):
                raise SourceError(
                    f"{folder / 'config.json'} states {name} {part[name]!r}, which is no type of torch; remove it, "
                    "because the option --dtype sets the type of the export."
                ) from error
    if config.get("model_type") in CONFIG_MAPPING:
        raise SourceError(
            f"{folder / 'config.json'} is not a configuration of {config['model_type']} ({one_line(error)}); correct "
            "the setting."
        ) from error


def rope_notices(config: Any) -> list[str]:
    """Return a notice on a linear RoPE, whose stated length may be that before or after scaling.

    vLLM takes it for the former, except in Gemma 3.
    """
    text = config.get_text_config(decoder=True)
    factors = [
        kind.get("factor") or 1.0
        for kind in _rope_kinds(text)
        if kind.get("rope_type", kind.get("type")) == "linear" and not kind.get(_ORIGINAL)
    ]
    if max(factors, default=1.0) > 1 and not text.model_type.startswith("gemma3"):
        length = context_length(config)
        return [
            f"the context is the stated {length} tokens; if that is the length before linear scaling, set "
            f"max_position_embeddings to {int(length * max(factors))}, which vLLM takes"
        ]
    return []


def class_notices(folder: Path, model: PreTrainedModel, *, trust_remote_code: bool) -> list[str]:
    """Return a notice if the configuration in `folder` names another class than that of `model`."""
    config, kind = read_json(folder / "config.json"), type(model).__name__
    own, named = config.get("auto_map"), config.get("architectures")
    code = own.get("AutoModelForCausalLM") if isinstance(own, dict) else None
    if code and not trust_remote_code:
        return [
            f"config.json names code of its own ({code}), which was not run: transformers' {kind} was exported; "
            "--trust-remote-code runs it"
        ]
    others = [str(name) for name in named] if isinstance(named, list) else []
    if code or not others or kind.lower() in map(str.lower, others):
        return []
    return [
        f"config.json names the architecture {others[0]}, but transformers makes {kind} of its model_type "
        f"{config.get('model_type')!r}, which was exported"
    ]


def exported_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json to export for the source's `config`: of a composite model, the text decoder's part."""
    if not any(name.endswith("_config") and name != "quantization_config" for name in config):
        return config
    with contextlib.suppress(UnsupportedModelError):  # the configuration needs remote code
        composite = Composite.of(load_config(folder))
        if composite is not None:
            text: dict[str, Any] = json.loads(text_configuration(composite).to_json_string(use_diff=False))
            return text | dict.fromkeys(SPECIAL_IDS) | special_ids(config)
    return config


def context_length(config: Any) -> int:
    """Return the context length in tokens. For a switching RoPE type, this is the original context length.

    Returns _UNLIMITED for a model that states no length and is recurrent, attends only within a window, or has no
    positions. Raises UnsupportedModelError for other models that state no length.
    """
    config = config.get_text_config(decoder=True)
    stated = (getattr(config, name, None) for name in _LENGTH_NAMES)
    length = next((found for found in stated if found is not None), None)
    forgets = set(getattr(config, "layer_types", None) or ["full_attention"]) <= _BOUNDED_LAYERS
    if length is None and (forgets or config.model_type in _UNLIMITED_TYPES):
        return _UNLIMITED
    if not isinstance(length, int) or length < 1:
        raise UnsupportedModelError(
            f"the configuration of {config.model_type!r} has no max_position_embeddings; add the context length to it."
        )
    rope = switching_rope(config)
    return min(length, rope) if rope is not None else max(length, _yarn_length(config))


def _yarn_length(config: Any) -> int:
    """Return the context length that YaRN states, the original length times its factor; 0 without YaRN.

    vLLM derives the same. A configuration may leave max_position_embeddings at the original length, as Qwen documents.
    """
    yarn = [kind for kind in _rope_kinds(config) if kind.get("rope_type", kind.get("type")) == "yarn"]
    original = [kind.get(_ORIGINAL) or config.max_position_embeddings for kind in yarn]
    factors = [kind.get("factor") or 1.0 for kind in yarn]
    return min((int(length * factor) for length, factor in zip(original, factors, strict=True)), default=0)


def _rope_kinds(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE parameters, which may be stated per type of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def switching_rope(config: Any) -> int | None:
    """Return the length in tokens beyond which a switching RoPE type changes its frequencies; None for other types."""
    config = config.get_text_config(decoder=True)
    for kind in _rope_kinds(config):
        name = kind.get("rope_type", kind.get("type"))
        if name in _SWITCHING_ROPE:
            original = None if name == "dynamic" else kind.get(_ORIGINAL) or getattr(config, _ORIGINAL, None)
            return int(original or config.max_position_embeddings)
    return None


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Inside the block, transformers logs errors alone and shows no progress bars."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
