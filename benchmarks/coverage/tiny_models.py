"""Tiny random models of any architecture, and their checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.coverage.architectures import all_types
from benchmarks.coverage.tiny_configs import tiny_config

WEIGHT_SCALE = 6  # initial weights are too small for attention to matter
NOISE = 0.1  # makes biases, norms and sinks differ from their initial 0 or 1
LEAST_EFFECT = 0.1  # of the first token on the last logits: a thousand times the bound of the verification
TEXT_PARTS = {"gemma3n": "gemma3n_text"}
"""Composites that need further packages (timm) to be built -> model type of their text part."""
# State decays are exponentials of these: scaled up, they would erase the states at once.
_UNSCALED = re.compile(r"A_log|(^|\.)D$|conv|time_|dt_|decay|slope|_freq")


def tiny_model(model_type: str) -> Any:
    """A model with random float32 weights, in evaluation mode; the whole model for a multimodal type."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    torch.manual_seed(0)
    config = tiny_config(model_type)
    # A composite's causal model is its text part; some other classes state no configuration of their own.
    part = AutoModelForCausalLM._model_mapping[type(config)].config_class is not type(config)
    composite = part and type(config) in AutoModelForMultimodalLM._model_mapping
    auto = AutoModelForMultimodalLM if composite else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() > 1 and not parameter.any():  # would leave out what reads it
                parameter.normal_(std=NOISE)
            elif parameter.dim() > 1 and not _UNSCALED.search(name):
                parameter.mul_(WEIGHT_SCALE)
            elif parameter.dim() == 1:
                parameter.add_(NOISE * torch.randn_like(parameter))
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # DeepSeek V4's experts of each token
                table.random_(config.n_routed_experts)
    return model


def check_forward(model: Any) -> float:
    """The largest change of the last token's logits when the first of six tokens changes.

    Raises ValueError for logits that are not finite.
    """
    import torch

    ids = torch.tensor([[5, 17, 90, 33, 61, 8], [6, 17, 90, 33, 61, 8]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -1]
    if not torch.isfinite(logits).all():
        raise ValueError("the logits are not finite")
    return float((logits[0] - logits[1]).abs().max())


def write_checkpoint(model_type: str, folder: Path) -> Path:
    """A Hugging Face folder: configuration, weights, tokenizer.

    Raises ValueError for unusable logits, and any error of the architecture's code.
    """
    from tests.support.tiny_models import write_tokenizer

    model = tiny_model(TEXT_PARTS.get(model_type, model_type))
    if not check_forward(model) > LEAST_EFFECT:
        raise ValueError("the last logits do not depend on the first token")
    model.save_pretrained(folder)
    if model_type in TEXT_PARTS:
        _as_part(model_type, folder)
    write_tokenizer(folder)
    return folder


def _as_part(model_type: str, folder: Path) -> None:
    """Rename the weights of a text model to those of the composite's text part, and store the composite's config."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    renamed = {re.sub(r"^model\.", "model.language_model.", name): value for name, value in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = tiny_config(model_type)
    config.architectures = [all_types()[model_type]]
    config.save_pretrained(folder)
