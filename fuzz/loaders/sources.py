"""The loaders of what an export reads.

These are checkpoints, other exporters' decoders, tokenizers, and arrays.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.loaders.loader import Loader
from tests.support.attacks import call, function, nested_if, safetensors
from topw_deploy.errors import SourceError

_LARGEST_FILE = 1 << 20  # bytes of the tensors in a file that a loader makes


def checkpoint(scratch: Path) -> Loader:
    """safetensors files and their index; the first byte of an input chooses which."""
    from topw_deploy.export.source.files import INDEX, SINGLE, stored_tensors

    tensor = {"dtype": "F16", "shape": [2, 4], "data_offsets": [0, 16]}
    other = {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]}
    whole = safetensors({"__metadata__": {"format": "pt"}, "a": tensor, "b": other}, bytes(22))
    (scratch / "part.safetensors").write_bytes(whole)
    index = json.dumps({"weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}).encode()

    def read(data: bytes) -> None:
        for name in (SINGLE, INDEX):
            (scratch / name).unlink(missing_ok=True)
        (scratch / (INDEX if data[:1] == b"\1" else SINGLE)).write_bytes(data[1:])
        for stored in stored_tensors(scratch).values():
            stored.array()

    return Loader(read, (b"\0" + whole, b"\1" + index))


def torch_file(scratch: Path) -> Loader:
    import torch

    from topw_deploy.export.source.files import tensors_in_torch_file

    path = scratch / "pytorch_model.bin"
    torch.save({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.float16)}, path)
    seed = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for stored in tensors_in_torch_file(path).values():
            stored.array()

    return Loader(read, (seed,))


def torch_pickle(scratch: Path) -> Loader:
    """The pickle inside a file of PyTorch, in an archive that is intact."""
    import torch

    from topw_deploy.export.source.files import tensors_in_torch_file

    path = scratch / "pytorch_model.bin"
    whole = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": whole, "b": whole[1:], "c": torch.ones(4, dtype=torch.float16)}, path)
    with zipfile.ZipFile(path) as archive:
        records = [(record.filename, archive.read(record)) for record in archive.infolist()]
    (seed,) = (content for name, content in records if name.endswith("/data.pkl"))

    def read(data: bytes) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in records:
                archive.writestr(name, data if name.endswith("/data.pkl") else content)
        for stored in tensors_in_torch_file(path).values():
            stored.array()

    return Loader(read, (seed,))


def foreign_config(scratch: Path) -> Loader:
    """config.json and genai_config.json beside another exporter's decoder; the first byte of an input chooses which."""
    from tests.support.tiny_models import write_decoder
    from topw_deploy.export.foreign import load_decoder
    from topw_deploy.export.source.resolve import resolve

    place = write_decoder(scratch / "decoder", "llama_tied")
    names = ("config.json", "genai_config.json")
    config = json.loads((place / names[0]).read_text())
    genai = {"model": {"type": "llama", "context_length": 64, "decoder": {"filename": "model.onnx", "head_size": 8,
             "num_key_value_heads": 2, "sliding_window": {"window_size": 8},
             "session_options": {"custom_ops_library": "evil.so"}}}}  # fmt: skip

    def read(data: bytes) -> None:
        (place / names[0]).write_text(json.dumps(config))
        (place / names[1]).unlink(missing_ok=True)
        if data:
            (place / names[data[0] % 2]).write_bytes(data[1:])
        source = resolve(str(place))
        assert source.onnx == place / "model.onnx"
        load_decoder(source.onnx, place)

    return Loader(read, (b"\0" + json.dumps(config).encode(), b"\1" + json.dumps(genai).encode()))


def config(scratch: Path) -> Loader:
    """A checkpoint's config.json, from which a model without values of weights is made."""
    from tests.support.tiny_models import write_checkpoint
    from topw_deploy.export.source.checkpoint import context_length, exported_config, load_unread

    place = write_checkpoint(scratch / "llama", "llama_tied")
    seed = (place / "config.json").read_bytes()

    def read(data: bytes) -> None:
        (place / "config.json").write_bytes(data)
        model, _ = load_unread(place, "float32")
        context_length(model.config)
        exported_config(place, json.loads(data))

    composite = {**json.loads(seed), "text_config": {"model_type": "llama", "num_hidden_layers": 2}, "rope_scaling":
                 {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}}  # fmt: skip
    return Loader(read, (seed, json.dumps(composite).encode()))


def quantised(scratch: Path) -> Loader:
    """Quantised checkpoints: their settings, and the types and shapes of their tensors.

    An input is JSON with `config`, the content of config.json, and `tensors`, the type and shape of each tensor.
    """
    from topw_deploy.export.source.quantised import QuantisedCheckpoint
    from topw_deploy.safetensors_header import ELEMENT_BYTES

    def read(data: bytes) -> None:
        try:
            given = json.loads(data)
            config, tensors = json.dumps(given["config"]), dict(given["tensors"])
            header, place = {}, 0
            for name, (dtype, shape) in tensors.items():
                size = ELEMENT_BYTES[dtype] * int(np.prod([int(axis) for axis in shape], dtype=object))
                if not 0 <= size <= _LARGEST_FILE:
                    raise ValueError("too large")
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
                place += size
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            raise SourceError("not a description of a checkpoint") from None
        (scratch / "config.json").write_text(config)
        content = np.random.default_rng(len(data)).integers(0, 255, place, np.uint8).tobytes()
        (scratch / "model.safetensors").write_bytes(safetensors(header, content))
        found = QuantisedCheckpoint.of(scratch)
        if found is not None:
            for weight in found.weights.values():
                assert weight.rows(slice(None)).shape == weight.shape
                weight.read((slice(0, 1), ...))

    return Loader(read, tuple(json.dumps(seed).encode() for seed in _quantised_seeds()))


def _quantised_seeds() -> list[Any]:
    def of(settings: dict[str, Any], **tensors: tuple[str, list[int]]) -> dict[str, Any]:
        named = {f"a.{name.replace('__', '.')}": value for name, value in tensors.items()}
        return {"config": {"model_type": "llama", "quantization_config": settings}, "tensors": named}

    word = {"qzeros": ("I32", [2, 1]), "scales": ("F16", [2, 8])}
    group = {"weights": {"num_bits": 4, "type": "int", "group_size": 4, "strategy": "group", "block_structure": [4, 4]}}
    compressed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group},
                  "sparsity_config": {"format": "dense"}, "ignore": ["lm_head"]}  # fmt: skip
    return [
        of({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "group_size": 8},
           qweight=("I32", [2, 8]), g_idx=("I32", [16]), **word),
        of({"quant_method": "awq", "bits": 4, "version": "gemm"}, qweight=("I32", [16, 1]), **word),
        of({**compressed, "format": "pack-quantized"}, weight_packed=("I32", [8, 1]), weight_scale=("BF16", [8, 2]),
           weight_shape=("I64", [2]), weight_zero_point=("I32", [1, 2])),
        of({**compressed, "format": "int-quantized"}, weight=("I8", [8, 8]), weight_scale=("F32", [8, 1]),
           weight_zero_point=("I8", [8, 1]), weight_g_idx=("I32", [8])),
        of({"quant_method": "fp8", "weight_block_size": [4, 4]}, weight=("F8_E4M3", [8, 8]),
           weight_scale_inv=("F32", [2, 2])),
        of({"quant_method": "fbgemm_fp8", "config_groups": {"group_0": group}}, weight=("F8_E5M2", [8, 8]),
           weight_scale=("F32", [8, 1])),
        of({"quant_method": "mxfp4"}, x_blocks=("U8", [2, 4, 1, 16]), x_scales=("U8", [2, 4, 1])),
    ]  # fmt: skip


def rank_files(scratch: Path) -> Loader:
    """tekken.json, tiktoken's file, and the tokenizer_config.json beside that; the first byte of an input chooses."""
    from tokenizers import Tokenizer

    from topw_deploy.export.source.tokenizer import check_tokenizer, write_tokenizer

    names = ("tekken.json", "tiktoken.model", "tokenizer_config.json")
    ranks = [_base64(bytes([byte])) for byte in range(256)] + [_base64(b"ab"), _base64(b" a")]
    lines = "".join(f"{token} {rank}\n" for rank, token in enumerate(ranks)).encode()
    specials = [{"rank": 0, "token_str": "<s>"}, {"rank": 1, "token_str": "</s>"}]
    tekken = {
        "config": {"pattern": "\\p{L}+|.", "default_vocab_size": 262, "default_num_special_tokens": 4},
        "special_tokens": specials,
        "vocab": [{"rank": i, "token_bytes": token} for i, token in enumerate(ranks)],
    }
    stated = {"added_tokens_decoder": {"258": {"content": "<s>"}}, "bos_token": "<s>", "add_bos_token": True,
              "chat_template": [{"name": "default", "template": "a"}]}  # fmt: skip

    def read(data: bytes) -> None:
        folder, output = scratch / "source", scratch / "output"
        for place in (folder, output):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        name = names[data[0] % len(names)] if data else names[0]
        if name == names[2]:
            (folder / names[1]).write_bytes(lines)
        (folder / name).write_bytes(data[1:])
        check_tokenizer(folder)
        write_tokenizer(folder, output)
        Tokenizer.from_file(str(output / "tokenizer.json")).encode("ab a")

    seeds = (json.dumps(tekken).encode(), lines, json.dumps(stated).encode())
    return Loader(read, tuple(bytes([place]) + seed for place, seed in enumerate(seeds)))


def _base64(token: bytes) -> str:
    return base64.b64encode(token).decode()


def sentencepiece(scratch: Path) -> Loader:
    """tokenizer.model of SentencePiece, which transformers converts."""
    from sentencepiece import SentencePieceTrainer

    from topw_deploy.export.source.tokenizer import check_tokenizer, write_tokenizer

    made = io.BytesIO()
    texts = ["def parse(text): return text", "a list of the words in the string", "the lazy dog"] * 20
    SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=made, vocab_size=48, model_type="bpe",
                               byte_fallback=False, minloglevel=3)  # fmt: skip

    def read(data: bytes) -> None:
        folder, output = scratch / "source", scratch / "output"
        for place in (folder, output):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        (folder / "tokenizer.model").write_bytes(data)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
        check_tokenizer(folder)
        write_tokenizer(folder, output)

    return Loader(read, (made.getvalue(),))


def arrays(scratch: Path) -> Loader:
    """.npy files of embeddings and of logits; the first byte of an input chooses which."""
    from topw_deploy.export.sampler_only import embeddings_of_file, median_distance_in_file
    from topw_deploy.sampling import Geometry

    path = scratch / "array.npy"
    rng = np.random.default_rng(0)
    geometry = Geometry.from_embeddings(rng.standard_normal((6, 3)).astype(np.float32), "cosine")

    def read(data: bytes) -> None:
        path.write_bytes(data[1:])
        if data[:1] == b"\1":
            median_distance_in_file(path, geometry, 6)
        else:
            table = embeddings_of_file(path)
            Geometry.from_embeddings(table, "cosine")

    def seed(array: np.ndarray) -> bytes:
        made = io.BytesIO()
        np.save(made, array)
        return made.getvalue()

    table, logits = rng.standard_normal((6, 3)), rng.standard_normal((4, 6)).astype(np.float32)
    return Loader(read, (b"\0" + seed(table.astype(np.float16)), b"\0" + seed(table), b"\1" + seed(logits)))


def foreign(scratch: Path) -> Loader:
    """Another exporter's decoder, as far as its graph and its configuration are read; its weights are not."""
    from tests.support.tiny_models import write_decoder
    from topw_deploy.export.foreign import load_decoder

    place = write_decoder(scratch / "decoder", "llama_tied")
    whole = (place / "model.onnx").read_bytes()

    def read(data: bytes) -> None:
        (place / "model.onnx").write_bytes(data)
        load_decoder(place / "model.onnx", place)

    return Loader(read, (whole, nested_if(3) + function("f", ["g"]) + function("g", []) + call("f")))
