"""Tiny checkpoints in FP8, MXFP4 and compressed-tensors, written bit by bit from the formats' definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GptOssConfig, PreTrainedModel

from tests.support.tiny_models import COMMON, make_model, write_tokenizer

BLOCK = (20, 24)  # neither divides the layers' sizes, so the last blocks are cut
GROUP = 16


def e4m3_values() -> np.ndarray:
    """The 256 values: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, all ones are NaN."""
    values = np.empty(256, np.float32)
    for byte in range(256):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[byte] = np.nan if exponent == 15 and mantissa == 7 else -size if byte & 128 else size
    return values


E4M3 = e4m3_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass
class Layer:
    """tensors: by name after the weight's own. weight: float32, decoded. codes: unsigned, if integers."""

    tensors: dict[str, torch.Tensor]
    weight: np.ndarray
    codes: np.ndarray | None = None


def nearest_codes(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.nanargmin(np.abs(table - values[..., None]), axis=-1).astype(np.uint8)


def round_to_float8(weight: np.ndarray, blocks: tuple[int, int], name: str, *, exponents: bool = False) -> Layer:
    """One scale per block, one for all if a block is the whole."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, blocks, strict=True))
    scales, codes = np.empty((rows, columns), np.float32), np.empty(weight.shape, np.uint8)
    decoded = np.empty_like(weight)
    for r in range(rows):
        for c in range(columns):
            here = np.s_[r * blocks[0] : (r + 1) * blocks[0], c * blocks[1] : (c + 1) * blocks[1]]
            scale = np.float32(np.abs(weight[here]).max() / 400)
            scales[r, c] = scale = np.float32(2.0 ** np.ceil(np.log2(scale))) if exponents else scale
            codes[here] = nearest_codes(weight[here] / scale, E4M3)
            decoded[here] = E4M3[codes[here]] * scale
    stored = torch.from_numpy(scales)
    if exponents:
        stored = torch.from_numpy((np.log2(scales) + 127).astype(np.uint8)).view(torch.float8_e8m0fnu)
    if blocks == weight.shape:
        stored = stored.reshape(())
    return Layer({"": torch.from_numpy(codes).view(torch.float8_e4m3fn), name: stored}, decoded)


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes [n, m] -> int32 [n, ceil(m * bits / 32)], lowest bits first."""
    per_word = 32 // bits
    found = np.zeros((len(codes), -(-codes.shape[1] // per_word)), np.uint32)
    for column in range(codes.shape[1]):
        found[:, column // per_word] |= codes[:, column].astype(np.uint32) << np.uint32(bits * (column % per_word))
    return found.view(np.int32)


def round_to_integers(
    weight: np.ndarray, bits: int, group: int, *, packed: bool, symmetric: bool, order: bool = False
) -> Layer:
    """compressed-tensors' signed codes; `order` scatters a group's inputs."""
    inputs = weight.shape[1]
    groups = np.arange(inputs) // group
    if order:
        groups = np.random.default_rng(inputs).permutation(groups)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    count = int(groups.max()) + 1
    scales = np.empty((len(weight), count), np.float32)
    zeros, codes = np.zeros(scales.shape, np.int64), np.empty(weight.shape, np.int64)
    for g in range(count):
        part = weight[:, groups == g]
        least, most = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        scale = np.abs(part).max(axis=1) / high if symmetric else (most - least) / (high - low)
        scales[:, g] = torch.from_numpy(scale).bfloat16().float().numpy()
        if not symmetric:
            zeros[:, g] = np.clip(np.rint(low - least / scales[:, g]), low, high)
        codes[:, groups == g] = np.clip(np.rint(part / scales[:, g : g + 1] + zeros[:, g : g + 1]), low, high)
    decoded = (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups]
    tensors = {"_scale": torch.from_numpy(scales).bfloat16()}
    if packed:
        tensors["_packed"] = torch.from_numpy(pack_words(codes - low, bits))
        tensors["_shape"] = torch.tensor(weight.shape)
    else:
        tensors[""] = torch.from_numpy(codes.astype(np.int8))
    if not symmetric:
        shifted = np.ascontiguousarray(pack_words((zeros - low).T, bits).T)
        tensors["_zero_point"] = torch.from_numpy(shifted if packed else zeros.astype(np.int8))
    if order:
        tensors["_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return Layer(tensors, decoded, (codes - low).astype(np.uint8))


def _compressed_settings(form: str, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


@dataclass(frozen=True)
class Kind:
    """A format: quantization_config, and how a layer is written."""

    settings: dict[str, Any]
    layer: Callable[[np.ndarray], Layer] = field(repr=False)


def _float8_layer(
    name: str, blocks: Callable[[np.ndarray], tuple[int, int]], **how: bool
) -> Callable[[np.ndarray], Layer]:
    return lambda weight: round_to_float8(weight, blocks(weight), name, **how)


def _integer_layer(bits: int, group: int | None, **how: bool) -> Callable[[np.ndarray], Layer]:
    return lambda weight: round_to_integers(weight, bits, group or weight.shape[1], **how)


FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
KINDS: dict[str, Kind] = {
    "fp8 blocks": Kind(FP8, _float8_layer("_scale_inv", lambda _: BLOCK)),
    "fp8 blocks, ue8m0": Kind(
        FP8 | {"scale_fmt": "ue8m0"}, _float8_layer("_scale_inv", lambda _: BLOCK, exponents=True)
    ),
    "fp8 one scale": Kind({"quant_method": "fp8"}, _float8_layer("_scale_inv", lambda weight: weight.shape)),
    "fbgemm": Kind({"quant_method": "fbgemm_fp8"}, _float8_layer("_scale", lambda weight: (1, weight.shape[1]))),
    "modelopt": Kind({"quant_method": "modelopt", "quant_algo": "FP8"}, _float8_layer("_scale", lambda w: w.shape)),
    "compressed fp8, rows": Kind(
        _compressed_settings("float-quantized", num_bits=8, type="float", strategy="channel"),
        _float8_layer("_scale", lambda weight: (1, weight.shape[1])),
    ),
    "compressed fp8, blocks": Kind(
        _compressed_settings(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=list(BLOCK)
        ),
        _float8_layer("_scale", lambda _: BLOCK),
    ),
    "compressed int4": Kind(
        _compressed_settings("pack-quantized", num_bits=4, type="int", group_size=GROUP),
        _integer_layer(4, GROUP, packed=True, symmetric=True),
    ),
    "compressed int4, asymmetric": Kind(
        _compressed_settings("pack-quantized", num_bits=4, type="int", group_size=GROUP, symmetric=False),
        _integer_layer(4, GROUP, packed=True, symmetric=False),
    ),
    "compressed int4, actorder": Kind(
        _compressed_settings("pack-quantized", num_bits=4, type="int", group_size=GROUP, actorder="group"),
        _integer_layer(4, GROUP, packed=True, symmetric=False, order=True),
    ),
    "compressed int8, packed": Kind(
        _compressed_settings("pack-quantized", num_bits=8, type="int", group_size=GROUP),
        _integer_layer(8, GROUP, packed=True, symmetric=True),
    ),
    "compressed int8, rows": Kind(
        _compressed_settings("naive-quantized", num_bits=8, type="int", strategy="channel"),
        _integer_layer(8, None, packed=False, symmetric=True),
    ),
    "compressed int8, asymmetric": Kind(
        _compressed_settings("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        _integer_layer(8, None, packed=False, symmetric=False),
    ),
}


def write_quantised(folder: Path, kind: str) -> dict[str, Layer]:
    """An untied Llama with quantised layers, which are returned by the weight's name."""
    model = make_model("llama_untied")
    layers = {}
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = f"{name}.weight"
            layers[weight] = KINDS[kind].layer(tensors.pop(weight).numpy())
            tensors |= {weight + end: value.contiguous() for end, value in layers[weight].tensors.items()}
    _write_folder(folder, model, tensors, KINDS[kind].settings)
    return layers


def write_gpt_oss(folder: Path) -> dict[str, np.ndarray]:
    """gpt-oss with experts in MXFP4; returns them decoded, [experts, inputs, outputs]."""
    config = GptOssConfig(
        **{**COMMON, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
    )
    model = make_model(config)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    decoded = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = tensors.pop(name).numpy().swapaxes(1, 2)  # [experts, outputs, inputs]
        blocked = weight.reshape(*weight.shape[:2], -1, 32)
        exponents = np.ceil(np.log2(np.abs(blocked).max(axis=-1) / 6)).astype(np.int64)
        scales = 2.0 ** exponents[..., None]
        codes = nearest_codes(blocked / scales, E2M1)
        tensors[f"{name}_blocks"] = torch.from_numpy(codes[..., 0::2] | (codes[..., 1::2] << 4))
        tensors[f"{name}_scales"] = torch.from_numpy((exponents + 127).astype(np.uint8))
        decoded[name] = (E2M1[codes] * scales).astype(np.float32).reshape(weight.shape).swapaxes(1, 2)
    _write_folder(folder, model, tensors, {"quant_method": "mxfp4"})
    return decoded


def _write_folder(
    folder: Path, model: PreTrainedModel, tensors: dict[str, torch.Tensor], settings: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    write_tokenizer(folder)
