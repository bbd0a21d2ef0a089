"""Load Hugging Face checkpoints into torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from topw_deploy.errors import SourceError, UnsupportedModelError, one_line
from topw_deploy.export.source.packed import PackedCheckpoint, packed_format
from topw_deploy.export.source.safetensors_files import stored_tensors

_NO_LIMIT = 65_536  # tokens; bounds rotary tables
_FORGETTING_LAYERS = {"linear_attention", "sliding_attention"}
# RoPE types whose frequencies change beyond the original context; a graph holds only the original frequencies.
_RECURRENT_TYPES = {"xlstm"}  # that state no layer types
_SWITCHING_ROPE = {"longrope", "dynamic", "su"}


def load_checkpoint(
    folder: Path,
    dtype: str,
    *,
    num_hidden_layers: int | None = None,
    trust_remote_code: bool = False,
    unread: bool = False,
) -> PreTrainedModel:
    """Load a causal LM on the CPU, in evaluation mode.

    dtype: a torch dtype's name.
    unread: leave weights in files as `UnreadTensor`s.
    Raises UnsupportedModelError for unknown architectures, SourceError for damaged or missing weights.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if num_hidden_layers is not None:
        _cut_layers(config, num_hidden_layers)
    settings = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    packed = PackedCheckpoint.of(folder)
    with _quiet():
        try:
            if unread or packed is not None:
                model, info = _unread_model(folder, config, settings, packed, unread=unread)
            else:
                model, info = AutoModelForCausalLM.from_pretrained(
                    folder, config=config, output_loading_info=True, local_files_only=True, **settings
                )
        except Exception as error:  # foreign models and damaged files can raise anything
            raise SourceError(
                f"the model in {folder} cannot be loaded ({one_line(error)}); check its files."
            ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise SourceError(
            f"the weights in {folder} lack {len(missing)} tensors of the model (first: {missing[0]}); fetch them again."
        )
    return model.eval()


def load_unread(
    folder: Path, dtype: str, *, num_hidden_layers: int | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, str | None]:
    """Load a causal LM with unread weights; if impossible, with weights in memory. Returns (model, reason or None).

    Raises like load_checkpoint.
    """
    wanted = {"num_hidden_layers": num_hidden_layers, "trust_remote_code": trust_remote_code}
    try:
        return load_checkpoint(folder, dtype, unread=True, **wanted), None  # type: ignore[arg-type]
    except UnsupportedModelError:
        raise
    except SourceError as error:  # pickled weights, or code needing values
        return load_checkpoint(folder, dtype, **wanted), str(error)  # type: ignore[arg-type]


def _unread_model(
    folder: Path, config: Any, settings: dict[str, Any], packed: PackedCheckpoint | None, *, unread: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Assemble the model from a state_dict, which transformers accepts only without a folder."""
    from topw_deploy.export.source.unread_tensor import UnreadTensor

    if packed is not None:
        tensors = packed.unread()
    else:
        tensors = {name: UnreadTensor.of(stored) for name, stored in stored_tensors(folder).items()}
    if not unread:
        tensors = {name: tensor.values().clone() for name, tensor in tensors.items()}
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, **settings)
    model, info = type(empty).from_pretrained(
        None, config=empty.config, state_dict=tensors, dtype=settings["dtype"], output_loading_info=True
    )
    _read_buffers(model)
    return model, info


def _read_buffers(model: torch.nn.Module) -> None:
    """Load buffers: they are small and modified in place."""
    from topw_deploy.export.source.unread_tensor import UnreadTensor

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(buffer, UnreadTensor):
                setattr(module, name, buffer.values().clone())


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load a configuration. Raises UnsupportedModelError unless it is a supported causal decoder."""
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        except Exception as error:
            raise UnsupportedModelError(
                f"the installed transformers does not support the architecture of the configuration in {folder} "
                f"({one_line(error)}); models with their own code need --trust-remote-code."
            ) from error
    known = type(config) in AutoModelForCausalLM._model_mapping
    remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not known and not remote:
        raise UnsupportedModelError(
            f"the architecture {config.model_type!r} is not a causal language model in transformers; "
            "choose a decoder-only model."
        )
    if getattr(config, "quantization_config", None) is not None:
        if packed_format(folder) is None:
            raise UnsupportedModelError(
                f"the checkpoint in {folder} is quantised, but its config.json does not say how; "
                "export the unquantised one."
            )
        del config.quantization_config  # load layers as ordinary ones
    if getattr(config, "rescale_every", 0):
        config.rescale_every = 0  # RWKV: halves weights in place, and activations, for float16; logits are the same
    return config


def context_length(config: Any) -> int:
    """Maximum sequence length; for switching RoPE types, the original one.

    Models that only recur or look back through a window, and name no length, have no limit: then _NO_LIMIT.
    """
    config = config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if length is None and (layers <= _FORGETTING_LAYERS or config.model_type in _RECURRENT_TYPES):
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
