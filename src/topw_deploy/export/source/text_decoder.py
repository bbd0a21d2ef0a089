"""Take the text decoder out of a model that also reads images, video or audio.

transformers loads such a composite checkpoint as a whole. Its decoder then becomes part of a causal LM of the class
registered for the text configuration, of an equivalent class if the decoder has rotary sections (M-RoPE), or of the
class `TextDecoder`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from topw_deploy.errors import UnsupportedModelError, VerificationError
from topw_deploy.export.source.unread_tensor import load_during_calls

# model_type of a text model with rotary sections for time, height and width -> the model_type of the causal LM that
# computes the same on text, and the settings that this LM needs.
_EQUAL_IN_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
_COMPARED_TOKENS = 24
# Maximum difference of logits, relative to the largest logit: the two models may only differ in the order of sums.
_LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Text models that scale their logits when they stand alone, but not within a composite model.
_LOGITS_NOT_SCALED = {
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "granite": {"logits_scaling": 1.0},
}
_CLASS_FIELDS = ("model_type", "architectures", "transformers_version")
_SECTIONS = ("mrope_section", "mrope_interleaved")


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
    head = loaded.get_output_embeddings() or _head_above(loaded, decoder)
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


def check_equal_on_text(composite: Composite, loaded: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raises VerificationError unless `loaded` and its text decoder give equal logits for text."""
    ids = torch.tensor([_text_token_ids(composite)])
    with torch.no_grad(), load_during_calls(loaded):  # reads only the weights that text needs
        expected, found = (model(input_ids=ids).logits.float() for model in (loaded, decoder))
    bound = _LARGEST_DIFFERENCE[decoder.dtype] * max(1.0, float(expected.abs().max()))
    difference = float((expected - found).abs().max())
    if not difference <= bound:
        raise VerificationError(
            f"the text decoder of {type(loaded).__name__} differs from the whole model on text by {difference:.2g} in "
            f"logits, but rounding explains at most {bound:.2g}; report this model."
        )


def _text_token_ids(composite: Composite) -> list[int]:
    """Token ids evenly spread over the vocabulary, except placeholders of images and other inputs."""
    parts = [composite.config, *(getattr(composite.config, name, None) for name in composite.config.sub_configs)]
    fields = [(name, value) for part in parts if part is not None for name, value in vars(part).items()]
    numbers = [(name, value) for name, value in fields if isinstance(value, int) and not isinstance(value, bool)]
    special = {value for name, value in numbers if name.endswith(("_token_id", "_token_index", "_token"))}
    end = min([composite.text.vocab_size, *(value for name, value in numbers if name == "vocab_offset" and value > 0)])
    spread = dict.fromkeys(int(place) for place in torch.linspace(0, end - 1, _COMPARED_TOKENS + len(special)))
    return [token for token in spread if token not in special][:_COMPARED_TOKENS] or [0]


def has_rotary_sections(text: Any) -> bool:
    """Whether positions of image tokens have several coordinates (M-RoPE)."""
    rope = getattr(text, "rope_parameters", None) or {}
    return any(name in rope for name in _SECTIONS)


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


def _head_above(loaded: PreTrainedModel, decoder: PreTrainedModel) -> torch.nn.Module | None:
    """Return the module `lm_head` of the nearest module around the decoder that has one."""
    path = _path_of(loaded, decoder)
    while path:
        path = path.rpartition(".")[0]
        head = getattr(loaded.get_submodule(path), "lm_head", None)
        if isinstance(head, torch.nn.Module):
            return head
    return None


def _path_of(loaded: PreTrainedModel, wanted: torch.nn.Module | None) -> str:
    """Return the dotted name of a module within `loaded`; "" if it is not there."""
    return next((name for name, module in loaded.named_modules() if module is wanted), "")


def _share_parameters(source: PreTrainedModel, target: torch.nn.Module) -> None:
    """Replace the parameters and buffers of `target` by those of `source`. Names and shapes must be the same."""
    parameters, buffers = dict(source.named_parameters()), dict(source.named_buffers())
    for name, expected in [*target.named_parameters(), *target.named_buffers()]:
        found = parameters.pop(name, None) if name in parameters else buffers.pop(name, None)
        if found is None or found.shape != expected.shape:
            raise UnsupportedModelError(
                f"{type(source).__name__} has {name} of shape {None if found is None else tuple(found.shape)}, but "
                f"{type(target).__name__} has {tuple(expected.shape)}; report this model."
            )
        owner, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(owner), leaf, found)
    if parameters:
        raise UnsupportedModelError(
            f"{type(source).__name__} has {next(iter(parameters))}, which {type(target).__name__} lacks; "
            "report this model."
        )


@contextlib.contextmanager
def allow_missing_packages() -> Iterator[None]:
    """Inside the block, an image or audio tower whose package (timm) is not installed becomes an empty module."""
    original = vars(AutoModel)["from_config"]
    make = AutoModel.from_config

    def from_config(config: Any, **settings: Any) -> Any:
        try:
            return make(config, **settings)
        except ImportError:
            return torch.nn.Module()

    AutoModel.from_config = staticmethod(from_config)  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutoModel.from_config = original  # type: ignore[method-assign]
