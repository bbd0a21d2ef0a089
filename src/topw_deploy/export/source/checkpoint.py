"""Load Hugging Face checkpoints into torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from topw_deploy.errors import SourceError, TopWError, UnsupportedModelError, one_line
from topw_deploy.export.source.files import stored_tensors
from topw_deploy.export.source.quantised import QuantisedCheckpoint, quantised_format
from topw_deploy.export.source.text_decoder import (
    Composite,
    allow_missing_packages,
    check_equal_on_text,
    has_rotary_sections,
    parts_left_out,
    text_configuration,
    text_decoder,
)

_UNLIMITED = 65_536  # tokens: the context of a model without a limit; bounds the size of rotary tables
_LENGTH_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")
_UNLIMITED_TYPES = {"bloom", "xlstm"}  # bloom has ALiBi; xlstm is recurrent, but its configuration has no layer types
_BOUNDED_LAYERS = {"linear_attention", "sliding_attention"}
# RoPE types whose frequencies change beyond the original context; a graph holds only the original frequencies.
_SWITCHING_ROPE = {"longrope", "dynamic", "su"}


def load_reference(
    folder: Path, dtype: str, *, num_hidden_layers: int | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal LM, or the text decoder of a composite model, on the CPU, in evaluation mode.

    dtype: name of the torch dtype to load, such as "float16".
    num_hidden_layers: load only the first layers; None loads all.
    trust_remote_code: run the model's own Python code.
    Raises UnsupportedModelError for unknown architectures, SourceError for damaged or missing weights, and
    VerificationError if a text decoder differs from its composite model on text.
    """
    model, composite = _load_model(folder, dtype, num_hidden_layers, trust_remote_code, unread=False)
    if composite is None:
        return model
    decoder = text_decoder(composite, model)
    check_equal_on_text(composite, model, decoder)
    return decoder


def _load_model(
    folder: Path, dtype: str, num_hidden_layers: int | None, trust_remote_code: bool, *, unread: bool
) -> tuple[PreTrainedModel, Composite | None]:
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if num_hidden_layers is not None:
        _cut_layers(config, num_hidden_layers)
    settings = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    quantised = QuantisedCheckpoint.of(folder)
    composite = Composite.of(config)
    with _silence_transformers():
        try:
            if composite is not None:
                model, info = _load_composite(folder, composite, settings["dtype"], quantised, unread=unread)
            elif unread or quantised is not None:
                model, info = _assemble_model(folder, config, settings, quantised, unread=unread)
            else:
                model, info = AutoModelForCausalLM.from_pretrained(
                    folder, config=config, output_loading_info=True, local_files_only=True, **settings
                )
        except TopWError:
            raise
        except Exception as error:  # foreign models and damaged files can raise anything
            raise SourceError(
                f"the model in {folder} cannot be loaded ({one_line(error)}); check its files."
            ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise SourceError(
            f"the weights in {folder} lack {len(missing)} tensors of the model (first: {missing[0]}); fetch them again."
        )
    return model.eval(), composite


def load_unread(
    folder: Path, dtype: str, *, num_hidden_layers: int | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """Load the model with weights left in their files, or in memory if the model's code needs their values.

    Returns (model, notices for the user). See load_reference for the arguments and errors.
    """
    notices = []
    try:
        model, composite = _load_model(folder, dtype, num_hidden_layers, trust_remote_code, unread=True)
    except UnsupportedModelError:
        raise
    except SourceError as error:  # the model's code may need values
        model, composite = _load_model(folder, dtype, num_hidden_layers, trust_remote_code, unread=False)
        notices.append(f"all weights were read into memory, because they could not be left in their files: {error}")
    if composite is None:
        return model, notices
    parts = ", ".join(parts_left_out(composite, model)) or "nothing"
    notices.append(f"only the text decoder of {type(model).__name__} was exported; left out: {parts}")
    if has_rotary_sections(composite.text):
        notices.append(
            "the rotary sections of this model (M-RoPE) have equal positions in text, so the graph takes one position "
            "a token"
        )
    return text_decoder(composite, model), notices


def _assemble_model(
    folder: Path, config: Any, settings: dict[str, Any], quantised: QuantisedCheckpoint | None, *, unread: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the model from a state_dict of unread or decoded tensors, which transformers takes only without a folder."""
    tensors = _unread_tensors(folder, quantised)
    if not unread:
        tensors = {name: tensor.values().clone() for name, tensor in tensors.items()}
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, **settings)
    model, info = type(empty).from_pretrained(
        None, config=empty.config, state_dict=tensors, dtype=settings["dtype"], output_loading_info=True
    )
    _read_buffers(model)
    return model, info


def _load_composite(
    folder: Path, composite: Composite, dtype: torch.dtype, quantised: QuantisedCheckpoint | None, *, unread: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the whole composite model. Without `unread`, read the values of the text decoder alone."""
    with allow_missing_packages():
        model, info = composite.model.from_pretrained(
            None,
            config=composite.config,
            state_dict=_unread_tensors(folder, quantised),
            dtype=dtype,
            output_loading_info=True,
        )
    towers = tuple(f"{part}." for part in parts_left_out(composite, model))
    info["missing_keys"] = [name for name in info["missing_keys"] if not name.startswith(towers)]
    _read_buffers(model)
    if not unread:
        _read_parameters(model, towers)
    return model, info


def _unread_tensors(folder: Path, quantised: QuantisedCheckpoint | None) -> dict[str, Any]:
    from topw_deploy.export.source.unread_tensor import UnreadTensor

    if quantised is not None:
        return quantised.unread()
    return {name: UnreadTensor.of(stored) for name, stored in stored_tensors(folder).items()}


def _read_parameters(model: torch.nn.Module, towers: tuple[str, ...]) -> None:
    """Load the values of all parameters but those of `towers`.

    Load a shared parameter once, so that it stays shared.
    """
    from topw_deploy.export.source.unread_tensor import UnreadTensor

    made: dict[int, torch.nn.Parameter] = {}
    for name, value in list(model.named_parameters(remove_duplicate=False)):
        if isinstance(value, UnreadTensor) and not name.startswith(towers):
            if id(value) not in made:
                made[id(value)] = torch.nn.Parameter(value.values().clone(), requires_grad=False)
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = made[id(value)]


def _read_buffers(model: torch.nn.Module) -> None:
    """Load the values of all buffers: models change them in place, and they are small."""
    from topw_deploy.export.source.unread_tensor import UnreadTensor

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(buffer, UnreadTensor):
                setattr(module, name, buffer.values().clone())


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the configuration in `folder`.

    Raises UnsupportedModelError unless it describes a supported causal decoder.
    """
    with _silence_transformers():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        except Exception as error:
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
    return config


def exported_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json to export for the source's `config`: of a composite model, the text decoder's part."""
    if not any(name.endswith("_config") and name != "quantization_config" for name in config):
        return config
    with contextlib.suppress(UnsupportedModelError):  # the configuration needs remote code
        composite = Composite.of(load_config(folder))
        if composite is not None:
            text: dict[str, Any] = json.loads(text_configuration(composite).to_json_string(use_diff=False))
            ids = {name: value for name, value in config.items() if name.endswith("_token_id") and name in text}
            return text | {name: value for name, value in ids.items() if text[name] is None}
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
    return min(length, rope) if rope is not None else length


def switching_rope(config: Any) -> int | None:
    """Return the length in tokens beyond which a switching RoPE type changes its frequencies; None for other types."""
    config = config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) in _SWITCHING_ROPE:
            return int(
                kind.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or config.max_position_embeddings
            )
    return None


def overflowing_modules(model: PreTrainedModel, batches: list[torch.Tensor]) -> list[str]:
    """Run the model on token ids, int64 [batch, sequence] each.

    Returns the names of modules that gave infinity or NaN.
    """
    found: dict[str, None] = {}

    def watch(name: str) -> Any:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple | list) else (output,)
            if any(
                isinstance(t, torch.Tensor) and t.is_floating_point() and not torch.isfinite(t).all() for t in tensors
            ):
                found.setdefault(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            for ids in batches:
                model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return list(found)


def _cut_layers(config: Any, layers: int) -> None:
    text = config.get_text_config(decoder=True)
    if layers > text.num_hidden_layers:
        raise UnsupportedModelError(
            f"num_hidden_layers is {layers}, but the model has {text.num_hidden_layers}; give at most that number.",
            "num_hidden_layers",
        )
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]


@contextlib.contextmanager
def _silence_transformers() -> Iterator[None]:
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
