"""Load Hugging Face checkpoints into torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from topw_deploy.errors import SourceError, TopWError, UnsupportedModelError, one_line
from topw_deploy.export.source.quantised import QuantisedCheckpoint, quantised_format
from topw_deploy.export.source.safetensors_files import stored_tensors
from topw_deploy.export.source.sizes import check_counts, check_sizes
from topw_deploy.export.source.text_decoder import (
    Composite,
    check_equal_on_text,
    has_rotary_sections,
    missing_packages_allowed,
    parts_left_out,
    text_configuration,
    text_decoder,
)

_NO_LIMIT = 65_536  # tokens; bounds rotary tables
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")
_WITHOUT_POSITIONS = {"bloom", "xlstm"}  # ALiBi; recurrent, but states no layer types
_FORGETTING_LAYERS = {"linear_attention", "sliding_attention"}
# RoPE types whose frequencies change beyond the original context; a graph holds only the original frequencies.
_SWITCHING_ROPE = {"longrope", "dynamic", "su"}


def load_checkpoint(
    folder: Path,
    dtype: str,
    *,
    num_hidden_layers: int | None = None,
    trust_remote_code: bool = False,
    unread: bool = False,
) -> PreTrainedModel:
    """Load a causal LM, or the text decoder of a composite model, on the CPU, in evaluation mode.

    dtype: a torch dtype's name.
    unread: leave weights in files as `UnreadTensor`s.
    Raises UnsupportedModelError for unknown architectures, SourceError for damaged or missing weights.
    """
    loaded = _load(folder, dtype, num_hidden_layers, trust_remote_code, unread=unread)
    return loaded.model if loaded.composite is None else text_decoder(loaded.composite, loaded.model)


def load_reference(
    folder: Path, dtype: str, *, num_hidden_layers: int | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load like load_checkpoint, with all values, and compare a text decoder with its composite model on text.

    Raises like load_checkpoint; VerificationError if the two differ.
    """
    loaded = _load(folder, dtype, num_hidden_layers, trust_remote_code, unread=False)
    if loaded.composite is None:
        return loaded.model
    decoder = text_decoder(loaded.composite, loaded.model)
    check_equal_on_text(loaded.composite, loaded.model, decoder)
    return decoder


@dataclass(frozen=True)
class _Loaded:
    model: PreTrainedModel
    composite: Composite | None


def _load(folder: Path, dtype: str, num_hidden_layers: int | None, trust_remote_code: bool, *, unread: bool) -> _Loaded:
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if num_hidden_layers is not None:
        _cut_layers(config, num_hidden_layers)
    settings = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    quantised = QuantisedCheckpoint.of(folder)
    composite = Composite.of(config)
    with _quiet():
        check_sizes(folder, lambda: _empty_model(config, composite, settings), quantised)
        try:
            if composite is not None:
                model, info = _composite_model(folder, composite, settings["dtype"], quantised, unread=unread)
            elif unread or quantised is not None:
                model, info = _unread_model(folder, config, settings, quantised, unread=unread)
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
    return _Loaded(model.eval(), composite)


def _empty_model(config: Any, composite: Composite | None, settings: dict[str, Any]) -> PreTrainedModel:
    """The model without values."""
    with torch.device("meta"), missing_packages_allowed():
        if composite is None:
            return AutoModelForCausalLM.from_config(config, **settings)
        return composite.model._from_config(composite.config, dtype=settings["dtype"])


def load_unread(
    folder: Path, dtype: str, *, num_hidden_layers: int | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """Load with unread weights, or with loaded weights if impossible; and notices.

    Raises like load_checkpoint.
    """
    notices = []
    try:
        loaded = _load(folder, dtype, num_hidden_layers, trust_remote_code, unread=True)
    except UnsupportedModelError:
        raise
    except SourceError as error:  # code that needs values
        loaded = _load(folder, dtype, num_hidden_layers, trust_remote_code, unread=False)
        notices.append(f"all weights were read into memory, because they could not be left in their files: {error}")
    if loaded.composite is None:
        return loaded.model, notices
    decoder = text_decoder(loaded.composite, loaded.model)
    return decoder, [*notices, *_composite_notices(loaded.composite, loaded.model)]


def _composite_notices(composite: Composite, model: PreTrainedModel) -> list[str]:
    parts = ", ".join(parts_left_out(composite, model)) or "nothing"
    found = [f"only the text decoder of {type(model).__name__} was exported; left out: {parts}"]
    if has_rotary_sections(composite.text):
        found.append(
            "the rotary sections of this model (M-RoPE) have equal positions in text, so the graph takes one position "
            "a token"
        )
    return found


def _unread_model(
    folder: Path, config: Any, settings: dict[str, Any], quantised: QuantisedCheckpoint | None, *, unread: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Assemble the model from a state_dict, which transformers accepts only without a folder."""
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


def _composite_model(
    folder: Path, composite: Composite, dtype: torch.dtype, quantised: QuantisedCheckpoint | None, *, unread: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The whole model. Only the text decoder's values are read, unless `unread`."""
    with missing_packages_allowed():
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
    """Load parameters, shared ones once; those of `towers` stay unread."""
    from topw_deploy.export.source.unread_tensor import UnreadTensor

    made: dict[int, torch.nn.Parameter] = {}
    for name, value in list(model.named_parameters(remove_duplicate=False)):
        if isinstance(value, UnreadTensor) and not name.startswith(towers):
            if id(value) not in made:
                made[id(value)] = torch.nn.Parameter(value.values().clone(), requires_grad=False)
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = made[id(value)]


def _read_buffers(model: torch.nn.Module) -> None:
    """Load buffers: they are small and modified in place."""
    from topw_deploy.export.source.unread_tensor import UnreadTensor

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(buffer, UnreadTensor):
                setattr(module, name, buffer.values().clone())


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load a configuration. Raises UnsupportedModelError unless it is a supported causal decoder."""
    check_counts(folder)
    with _quiet():
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
            del part.quantization_config  # load layers as ordinary ones
    if getattr(config, "rescale_every", 0):
        config.rescale_every = 0  # RWKV: halves weights in place, and activations, for float16; logits are the same
    return config


def written_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of an export of `config`, the source's: only the text decoder's part of a composite model."""
    if not any(name.endswith("_config") and name != "quantization_config" for name in config):
        return config
    with contextlib.suppress(UnsupportedModelError):  # remote code
        composite = Composite.of(load_config(folder))
        if composite is not None:
            text: dict[str, Any] = json.loads(text_configuration(composite).to_json_string(use_diff=False))
            ids = {name: value for name, value in config.items() if name.endswith("_token_id") and name in text}
            return text | {name: value for name, value in ids.items() if text[name] is None}
    return config


def context_length(config: Any) -> int:
    """Maximum sequence length; for switching RoPE types, the original one.

    Returns _NO_LIMIT for models that state no length and are recurrent, look back only through a window, or have no
    positions.
    """
    config = config.get_text_config(decoder=True)
    stated = (getattr(config, name, None) for name in _LENGTHS)
    length = next((found for found in stated if found is not None), None)
    forgets = set(getattr(config, "layer_types", None) or ["full_attention"]) <= _FORGETTING_LAYERS
    if length is None and (forgets or config.model_type in _WITHOUT_POSITIONS):
        return _NO_LIMIT
    if not isinstance(length, int) or length < 1:
        raise UnsupportedModelError(
            f"the configuration of {config.model_type!r} has no max_position_embeddings; add the context length to it."
        )
    rope = switching_rope(config)
    return min(length, rope) if rope is not None else length


def switching_rope(config: Any) -> int | None:
    """Length where switching RoPE changes frequencies; None for other types."""
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
    """Names of modules that return infinity or NaN for token ids `batches` [batch, sequence]."""
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
def _quiet() -> Iterator[None]:
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
