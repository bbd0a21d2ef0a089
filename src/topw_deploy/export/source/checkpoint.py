"""Loading a Hugging Face checkpoint into torch, and checking that it is one this exporter can serve."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from topw_deploy.errors import SourceError, UnsupportedModelError
from topw_deploy.export.source.packed.checkpoint import PackedCheckpoint
from topw_deploy.export.source.packed.formats import packed_format
from topw_deploy.export.source.safetensors_files import stored_tensors

# RoPE forms that switch frequencies when a sequence outgrows the length trained on: a graph holds the first ones.
_SWITCHING_ROPE = {"longrope", "dynamic", "su"}


def load_checkpoint(
    folder: Path,
    dtype: str,
    *,
    num_hidden_layers: int | None = None,
    trust_remote_code: bool = False,
    unread: bool = False,
) -> PreTrainedModel:
    """The causal LM of `folder` on the CPU, in evaluation mode, its weights in torch's `dtype` (`float32`, ...).

    num_hidden_layers: keep only the first so many layers. unread: leave the weights in their safetensors files, each
    parameter an `UnreadTensor`, which knows how to read it.
    Raises UnsupportedModelError naming an unknown architecture, SourceError for weights that are damaged or missing.
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
        except Exception as error:  # a foreign model or a damaged file may fail in any way
            raise SourceError(
                f"the model in {folder} cannot be loaded ({_first_line(error)}); check its files."
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
    """The model as `load_checkpoint` gives it, its weights left in their files where that can be; else, read whole,
    with the reason.

    Raises what load_checkpoint raises.
    """
    wanted = {"num_hidden_layers": num_hidden_layers, "trust_remote_code": trust_remote_code}
    try:
        return load_checkpoint(folder, dtype, unread=True, **wanted), None  # type: ignore[arg-type]
    except UnsupportedModelError:
        raise
    except SourceError as error:  # pickled weights, code that asks for values: whatever it is, reading them decides
        return load_checkpoint(folder, dtype, **wanted), str(error)  # type: ignore[arg-type]


def _unread_model(
    folder: Path, config: Any, settings: dict[str, Any], packed: PackedCheckpoint | None, *, unread: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """As transformers would load it, from tensors that are not read: it takes those under no folder's name. Packed
    layers are unpacked as they are read; not `unread`: here."""
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
    """Buffers of the checkpoint, such as the bias of a router, are small, and models compute with them in place."""
    from topw_deploy.export.source.unread_tensor import UnreadTensor

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(buffer, UnreadTensor):
                setattr(module, name, buffer.values().clone())


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of `folder`; raises UnsupportedModelError for what cannot be a causal decoder here."""
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        except Exception as error:
            raise UnsupportedModelError(
                f"the configuration in {folder} is of no architecture that this transformers knows "
                f"({_first_line(error)}); models with code of their own need --trust-remote-code."
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
                f"the checkpoint in {folder} is quantised in a way that its config.json does not tell; "
                "export the unquantised one."
            )
        del config.quantization_config  # its layers are read as ordinary ones
    return config


def context_length(config: Any) -> int:
    """Most tokens a sequence may have, from the configuration; for switching RoPE forms, the length trained on."""
    config = config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise UnsupportedModelError(
            f"the configuration of {config.model_type!r} names no max_position_embeddings; "
            "add the context length to it."
        )
    rope = switching_rope(config)
    return min(length, rope) if rope is not None else length


def switching_rope(config: Any) -> int | None:
    """The length up to which a switching RoPE form keeps its first frequencies; None for all others."""
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
    """Names of the modules whose output leaves float16's range on token ids `batches` [batch, sequence].

    Found by hooks on every module; an infinity or NaN in any output counts.
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
                model(input_ids=ids)
    finally:
        for handle in handles:
            handle.remove()
    return list(found)


def _cut_layers(config: Any, layers: int) -> None:
    text = config.get_text_config(decoder=True)
    if layers > text.num_hidden_layers:
        raise UnsupportedModelError(
            f"num_hidden_layers is {layers}, but the model has {text.num_hidden_layers}; give at most that.",
            "num_hidden_layers",
        )
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' notices and progress bars are about training and downloads; ours name what matters here."""
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
