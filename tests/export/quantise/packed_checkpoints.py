"""Tiny AutoGPTQ and AutoAWQ checkpoints with random weights, packed bit by bit, independently of the reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from torch import nn

from tests.support.tiny_models import make_model, write_tokenizer

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class RoundedLayer:
    """codes [inputs, outputs], float16 scales and zeros [groups, outputs], groups [inputs]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        """float32 [outputs, inputs]"""
        steps = self.codes.astype(np.float32) - self.zeros[self.groups]
        return (steps * self.scales.astype(np.float32)[self.groups]).T


def round_layer(weight: np.ndarray, bits: int, group: int, *, symmetric: bool, act_order: bool) -> RoundedLayer:
    """Round weight [outputs, inputs]; `act_order` scatters a group's inputs."""
    inputs = weight.shape[1]
    groups = np.arange(inputs) // group
    if act_order:
        groups = np.random.default_rng(inputs).permutation(groups)
    high = 2**bits - 1
    scales = np.empty((inputs // group, len(weight)), np.float16)
    zeros = np.empty(scales.shape, np.int64)
    codes = np.empty((inputs, len(weight)), np.int64)
    for g in range(len(scales)):
        part = weight[:, groups == g]
        if symmetric:
            scales[g], zeros[g] = np.abs(part).max(axis=1) / (high // 2), (high + 1) // 2
        else:
            low, top = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scales[g] = (top - low) / high
            zeros[g] = np.clip(np.rint(-low / scales[g]), 1, high)
        exact = part.T / scales[g].astype(np.float32) + zeros[g]
        codes[groups == g] = np.clip(np.rint(exact), 0, high)
    return RoundedLayer(codes, scales, zeros, groups)


def pack_gptq(layer: RoundedLayer, bits: int, *, second: bool) -> dict[str, np.ndarray]:
    per_word = 32 // bits
    inputs, outputs = layer.codes.shape
    words = np.zeros((inputs // per_word, outputs), np.uint32)
    for k in range(inputs):
        words[k // per_word] |= (layer.codes[k].astype(np.uint32)) << np.uint32(bits * (k % per_word))
    zeros = np.zeros((len(layer.zeros), outputs // per_word), np.uint32)
    for n in range(outputs):
        stored = (layer.zeros[:, n] - (0 if second else 1)).astype(np.uint32)
        zeros[:, n // per_word] |= stored << np.uint32(bits * (n % per_word))
    return {
        "qweight": words.view(np.int32),
        "qzeros": zeros.view(np.int32),
        "scales": layer.scales,
        "g_idx": layer.groups.astype(np.int32),
    }


def pack_awq(layer: RoundedLayer) -> dict[str, np.ndarray]:
    def packed(numbers: np.ndarray) -> np.ndarray:
        words = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
        for column in range(words.shape[1]):
            for place, output in enumerate(AWQ_ORDER):
                words[:, column] |= numbers[:, column * 8 + output].astype(np.uint32) << np.uint32(4 * place)
        return words.view(np.int32)

    return {"qweight": packed(layer.codes), "qzeros": packed(layer.zeros), "scales": layer.scales}


def _split_experts(name: str, weight: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Experts one by one, as checkpoints have them; other weights as they are."""
    stem, _, last = name.rpartition(".")
    if weight.ndim < 3:
        yield name, weight
    elif last == "gate_up_proj":
        for expert, (gate, up) in enumerate(np.split(one, 2) for one in weight):
            yield f"{stem}.{expert}.gate_proj.weight", gate
            yield f"{stem}.{expert}.up_proj.weight", up
    else:
        yield from ((f"{stem}.{expert}.{last}.weight", one) for expert, one in enumerate(weight))


def write_packed(
    folder: Path, family: str, settings: dict[str, object], *, symmetric: bool, act_order: bool = False
) -> dict[str, RoundedLayer]:
    """`settings`: quantization_config. Returns rounded layers by name."""
    bits, group = int(str(settings["bits"])), int(str(settings["group_size"]))
    model = make_model(family)
    model.config.save_pretrained(folder)
    layers, tensors = {}, {}
    for name, value in model.state_dict().items():
        tensors |= dict(_split_experts(name, value.numpy()))
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linear += [name.removesuffix(".weight") for name in tensors if ".experts." in name]
    for name in linear:
        if name != "lm_head":
            layer = round_layer(tensors.pop(f"{name}.weight"), bits, group, symmetric=symmetric, act_order=act_order)
            layers[name] = layer
            pack: Callable[[RoundedLayer], dict[str, np.ndarray]] = (
                pack_awq
                if settings["quant_method"] == "awq"
                else lambda one: pack_gptq(one, bits, second=settings.get("checkpoint_format") == "gptq_v2")
            )
            tensors |= {f"{name}.{part}": array for part, array in pack(layer).items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return layers
