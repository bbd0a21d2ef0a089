"""Tiny checkpoints in GPTQ, AWQ, FP8, MXFP4 and compressed-tensors, written bit by bit from their definitions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


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
    """tensors: by name after the weight's own, or in place of `.weight`. weight: float32, decoded.

    codes: unsigned, if integers.
    """

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


def round_in_groups(
    weight: np.ndarray, bits: int, groups: np.ndarray, symmetric: bool, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (unsigned codes, scales [outputs, groups], zero points >= 1, decoded weight). groups: of each input."""
    high, count = 2**bits - 1, int(groups.max()) + 1
    scales = np.empty((len(weight), count), np.float32)
    zeros, codes = np.full(scales.shape, 2 ** (bits - 1), np.int64), np.empty(weight.shape, np.int64)
    for g in range(count):
        part = weight[:, groups == g]
        least, most = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        scale = np.abs(part).max(axis=1) / (high // 2) if symmetric else (most - least) / high
        scales[:, g] = torch.from_numpy(scale).to(dtype).float().numpy()
        if not symmetric:
            zeros[:, g] = np.clip(np.rint(-least / scales[:, g]), 1, high)
        codes[:, groups == g] = np.clip(np.rint(part / scales[:, g : g + 1] + zeros[:, g : g + 1]), 0, high)
    decoded = (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups]
    return codes, scales, zeros, decoded


def input_groups(inputs: int, size: int, order: bool) -> np.ndarray:
    """The group of each input. `order` scatters a group's inputs."""
    groups = np.arange(inputs) // size
    return np.random.default_rng(inputs).permutation(groups) if order else groups


def round_to_integers(
    weight: np.ndarray, bits: int, group: int, *, packed: bool, symmetric: bool, order: bool = False
) -> Layer:
    """compressed-tensors' codes."""
    groups = input_groups(weight.shape[1], group, order)
    codes, scales, zeros, decoded = round_in_groups(weight, bits, groups, symmetric, torch.bfloat16)
    middle = 2 ** (bits - 1)
    tensors = {"_scale": torch.from_numpy(scales).bfloat16()}
    if packed:
        tensors["_packed"] = torch.from_numpy(pack_words(codes, bits))
        tensors["_shape"] = torch.tensor(weight.shape)
    else:
        tensors[""] = torch.from_numpy((codes - middle).astype(np.int8))
    if not symmetric:
        shifted = np.ascontiguousarray(pack_words(zeros.T, bits).T)
        tensors["_zero_point"] = torch.from_numpy(shifted if packed else (zeros - middle).astype(np.int8))
    if order:
        tensors["_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return Layer(tensors, decoded, codes.astype(np.uint8))


def round_for_gptq(
    weight: np.ndarray, bits: int, *, symmetric: bool, order: bool = False, second: bool = False
) -> Layer:
    """Zero points as AutoGPTQ packs them. second: as its second format does, which stores them unchanged."""
    groups = input_groups(weight.shape[1], GROUP, order)
    codes, scales, zeros, decoded = round_in_groups(weight, bits, groups, symmetric, torch.float16)
    tensors = {
        ".qweight": torch.from_numpy(pack_words(codes, bits).T),
        ".qzeros": torch.from_numpy(pack_words(zeros.T - (not second), bits)),
        ".scales": torch.from_numpy(scales.T).half(),
        ".g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return Layer(tensors, decoded, codes.astype(np.uint8))


def round_for_awq(weight: np.ndarray) -> Layer:
    """AutoAWQ's words, each of 8 outputs in the order AWQ_ORDER."""
    groups = input_groups(weight.shape[1], GROUP, order=False)
    codes, scales, zeros, decoded = round_in_groups(weight, 4, groups, False, torch.float16)

    def packed(numbers: np.ndarray) -> torch.Tensor:
        ordered = numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_ORDER]
        return torch.from_numpy(pack_words(ordered.reshape(numbers.shape), 4))

    tensors = {".qweight": packed(codes.T), ".qzeros": packed(zeros.T), ".scales": torch.from_numpy(scales.T).half()}
    return Layer(tensors, decoded, codes.astype(np.uint8))


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


def _integers(form: str, bits: int, group: int | None = None, *, symmetric: bool = True, order: bool = False) -> Kind:
    """compressed-tensors' codes. group: None for one scale per row."""
    weights = {"num_bits": bits, "type": "int"} | ({"strategy": "channel"} if group is None else {"group_size": group})
    weights |= ({} if symmetric else {"symmetric": False}) | ({"actorder": "group"} if order else {})
    how = {"packed": form == "pack-quantized", "symmetric": symmetric, "order": order}
    return Kind(
        _compressed_settings(form, **weights),
        lambda weight: round_to_integers(weight, bits, group or weight.shape[1], **how),
    )


def _gptq(bits: int = 4, **how: bool) -> Kind:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": how.get("order", False)}
    version = {"checkpoint_format": "gptq_v2"} if how.get("second") else {}
    return Kind(settings | version, lambda weight: round_for_gptq(weight, bits, **how))


FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
KINDS: dict[str, Kind] = {
    "gptq": _gptq(symmetric=True),
    "gptq, asymmetric": _gptq(symmetric=False),
    "gptq, version 2": _gptq(symmetric=False, second=True),
    "gptq, 8 bits": _gptq(8, symmetric=True),
    "gptq, actorder": _gptq(symmetric=False, order=True),
    "gptq, dynamic": Kind(
        _gptq(symmetric=True).settings | {"dynamic": {"+:.*down_proj.*": {"bits": 8}}},
        lambda weight: round_for_gptq(weight, 8 if weight.shape[0] < weight.shape[1] else 4, symmetric=True),
    ),
    "awq": Kind({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, round_for_awq),
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
    "compressed int4": _integers("pack-quantized", 4, GROUP),
    "compressed int4, asymmetric": _integers("pack-quantized", 4, GROUP, symmetric=False),
    "compressed int4, actorder": _integers("pack-quantized", 4, GROUP, symmetric=False, order=True),
    "compressed int8, packed": _integers("pack-quantized", 8, GROUP),
    "compressed int8, rows": _integers("naive-quantized", 8),
    "compressed int8, asymmetric": _integers("int-quantized", 8, symmetric=False),
}


def write_quantised(folder: Path, kind: str, family: str = "llama_untied") -> dict[str, Layer]:
    """A model with quantised layers, which are returned by the weight's name. Experts are stored one by one."""
    model = make_model(family)
    layers = {}
    tensors = {name: part for full, value in model.state_dict().items() for name, part in _split_experts(full, value)}
    linear = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for weight in [*linear, *(name for name in tensors if ".experts." in name)]:
        if not weight.startswith("lm_head"):
            layers[weight] = KINDS[kind].layer(tensors.pop(weight).numpy())
            stem = weight.removesuffix(".weight")
            tensors |= {
                (stem if end[:1] == "." else weight) + end: part for end, part in layers[weight].tensors.items()
            }
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    _write_folder(folder, model, tensors, KINDS[kind].settings)
    return layers


def _split_experts(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts one by one, as checkpoints have them; other weights as they are."""
    stem, _, last = name.rpartition(".")
    if weight.ndim < 3:
        yield name, weight
        return
    for expert, one in enumerate(weight):
        parts = zip(("gate_proj", "up_proj"), one.chunk(2), strict=True) if last == "gate_up_proj" else [(last, one)]
        yield from ((f"{stem}.{expert}.{part}.weight", matrix) for part, matrix in parts)


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
