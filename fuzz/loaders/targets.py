"""Every loader of files and requests, by name: what reads an input, and seeds from which inputs are made.

A target takes a folder for its files and returns a Loader. It imports what it needs, because atheris instruments only
what is imported after it.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.attacks import call, function, nested_if, put, safetensors
from tests.support.toy_model import Toy, export, export_sampler
from topw_deploy.errors import PromptError, SourceError, TopWError
from topw_deploy.manifest import MANIFEST_NAME, DecoderManifest, ModelFolder, manifest_from_json

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% if not loop.last %}{{ '\\n' * 2 }}{% endif %}{% endfor %}"
    "{% set ns = namespace(x='a') %}{% for i in range(3) %}{% set ns.x = ns.x ~ i %}{% endfor %}{{ ns.x }}"
    "{% macro f(n) %}{{ f(n - 1) if n else '' }}{% endmacro %}{{ f(2) }}{{ {'a': [1, 2.5]} | tojson(indent=2) }}"
    "{% if add_generation_prompt %}{{ '%s:%d' % ('a', 1) }}{{ '{0}{a}'.format(1, a=2) }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "x" * 100}]
_PUBLISHED = Path(__file__).parents[2] / "tests" / "runtime" / "templates"
_LARGEST_FILE = 1 << 20  # bytes of the tensors in a file that a target makes

SMALL_TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [{"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": True}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "end_of_word_suffix": None, "fuse_unk": False,
              "continuing_subword_prefix": None, "byte_fallback": False,
              "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": ["a b"]},
}  # fmt: skip


@dataclass(frozen=True)
class Loader:
    """A loader under test.

    read: reads an input; raises TopWError if it refuses the input.
    seeds: inputs from which others are made; most are valid.
    """

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


def refusal(loader: Loader, data: bytes) -> TopWError | None:
    """Read an input. Returns the error of a refusal, or None. Raises all other errors, because they are findings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loader.read(data)
        except TopWError as error:
            return error
    return None


LOADERS: dict[str, Callable[[Path], Loader]] = {}


def target(make: Callable[[Path], Loader]) -> Callable[[Path], Loader]:
    LOADERS[make.__name__.replace("_", "-")] = make
    return make


def one_of(seeds: Mapping[str, Any], read: Callable[[str, bytes], object]) -> Loader:
    """A loader of several kinds of inputs, of which the first byte chooses. read: called with a key of `seeds`.

    seeds: kind -> a seed, or a list of seeds; what is not bytes becomes JSON.
    """
    kinds = list(seeds)
    listed = [each if isinstance(each, list) else [each] for each in seeds.values()]
    return Loader(
        lambda data: read(kinds[data[0] % len(kinds)], data[1:]) if data else None,
        tuple(bytes([place]) + as_bytes(seed) for place, each in enumerate(listed) for seed in each),
    )


def as_bytes(seed: Any) -> bytes:
    return seed if isinstance(seed, bytes) else json.dumps(seed).encode()


def empty(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()


def exported(scratch: Path) -> Path:
    """Make a small export below `scratch`. Returns its folder."""
    return export(scratch / "export", Toy.random(2), generation_config={"eos_token_id": 1}, chat_template=TEMPLATE)


@target
def manifest(scratch: Path) -> Loader:
    """The manifests of a decoder and of a sampler alone."""
    folders = (exported(scratch), export_sampler(scratch / "sampler", Toy.random(2)))

    def read(data: bytes) -> None:
        found = manifest_from_json(data)
        assert manifest_from_json(found.to_json()) == found

    return Loader(read, tuple((folder / MANIFEST_NAME).read_bytes() for folder in folders))


@target
def folder(scratch: Path) -> Loader:
    """Files of an exported folder but the graph. onnxruntime, which is no part of this package, does not run."""
    from topw_deploy.runtime.chat import load_chat_template
    from topw_deploy.runtime.prepare import read_model_defaults
    from topw_deploy.runtime.tokenizer import Tokenizer

    place = exported(scratch)
    seeds = {
        "generation_config.json": {"eos_token_id": [1], "temperature": 0.5, "rule": "top_p", "top_p": 0.9, "beta": 2.5},
        "config.json": {"model_type": "toy", "text_config": {"eos_token_id": [1], "bos_token_id": 0}},
        "tokenizer_config.json": {"eos_token": {"content": "</s>"}, "chat_template": [
            {"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    }  # fmt: skip
    originals = {path: path.read_bytes() for path in place.iterdir() if path.name in (*seeds, MANIFEST_NAME)}

    def read(name: str, data: bytes) -> None:
        for path, original in originals.items():
            path.write_bytes(original)
        put(place, name, data)
        opened = ModelFolder(place, DecoderManifest)
        tokenizer = Tokenizer(opened)
        read_model_defaults(opened, tokenizer)
        template = load_chat_template(opened, tokenizer)
        if template is not None:
            template.render(MESSAGES)

    return one_of(seeds, read)


@target
def tokenizer(scratch: Path) -> Loader:
    from topw_deploy.runtime.tokenizer import Tokenizer

    place = exported(scratch)
    original = (place / MANIFEST_NAME).read_bytes()

    def read(data: bytes) -> None:
        (place / MANIFEST_NAME).write_bytes(original)
        put(place, "tokenizer.json", data)
        found = Tokenizer(ModelFolder(place, DecoderManifest))
        ids = found.encode("Hello <s> ab\n\u00e9" + "a" * 200)
        found.decode([*ids, 0, 1, 2, 999])
        text_decoder = found.text_decoder(ids)
        for token in (0, 1, 2, 3):
            text_decoder.push(token)
        text_decoder.flush()

    normalizers = [
        {"type": "Replace", "pattern": {"String": " "}, "content": "_"}, {"type": "NFKC"},
        {"type": "Prepend", "prepend": "_"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]  # fmt: skip
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["ab", -2.5]],
               "byte_fallback": False}  # fmt: skip
    pieces = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
              "vocab": {"a": 0, "##b": 1}}  # fmt: skip
    others: tuple[dict[str, Any], ...] = (
        {},
        {"normalizer": {"type": "Sequence", "normalizers": normalizers}},
        {"model": unigram},
        {"model": pieces, "post_processor": None},
    )
    return Loader(read, tuple(as_bytes({**SMALL_TOKENIZER, **other}) for other in others))


@target
def template(_scratch: Path) -> Loader:
    from topw_deploy.runtime.chat import ChatTemplate

    def read(data: bytes) -> None:
        made = ChatTemplate(data.decode("utf-8", "replace"), {"bos_token": "<s>", "eos_token": "</s>"})
        made.render(MESSAGES, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])

    return Loader(read, (TEMPLATE.encode(), *(path.read_bytes() for path in sorted(_PUBLISHED.iterdir()))))


@target
def session(scratch: Path) -> Loader:
    """A session file; also without its data, as then changes of the JSON keep the header's length right."""
    from tests.engine.test_session_file import FORM, TOKENS, states_of
    from topw_deploy.engine.session_file import read_session, write_session

    path = scratch / "session"
    write_session(path, FORM, TOKENS, states_of(5))
    seed = path.read_bytes()
    (length,) = struct.unpack("<Q", seed[:8])

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_session(path, FORM)

    return Loader(read, (seed, seed[: 8 + length]))


@target
def stamp(scratch: Path) -> Loader:
    """The description of a built engine."""
    from topw_deploy.tensorrt.stamp import read_stamp

    path = scratch / "gpu.json"
    sizes = {"least": 1, "usual": 2, "most": 4}
    whole = {
        "engine": "gpu.engine", "size": 5, "sha256": "0" * 64, "manifest": "0" * 64, "tensorrt": "10.16", "gpu": "G",
        "sm": 90, "plugin": "", "cache_length": 64, "workspace": None,
        "profiles": [{"name": "p", "batch": sizes, "sequence": sizes, "edits": sizes}], "topw_deploy": "0.1",
        "format_version": 1,
    }  # fmt: skip

    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert min(read_stamp(path).most) >= 0

    return Loader(read, (as_bytes(whole),))


@target
def checkpoint(scratch: Path) -> Loader:
    """safetensors files and their index."""
    from topw_deploy.export.source.files import INDEX, SINGLE, stored_tensors

    tensor = {"dtype": "F16", "shape": [2, 4], "data_offsets": [0, 16]}
    other = {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]}
    whole = safetensors({"__metadata__": {"format": "pt"}, "a": tensor, "b": other}, bytes(22))
    (scratch / "part.safetensors").write_bytes(whole)

    def read(name: str, data: bytes) -> None:
        for each in (SINGLE, INDEX):
            (scratch / each).unlink(missing_ok=True)
        (scratch / name).write_bytes(data)
        for stored in stored_tensors(scratch).values():
            stored.array()

    return one_of({SINGLE: whole, INDEX: {"weight_map": dict.fromkeys("ab", "part.safetensors")}}, read)


@target
def torch_file(scratch: Path) -> Loader:
    """A file of PyTorch, and the pickle inside one, in an archive that is intact."""
    import torch

    from topw_deploy.export.source.files import tensors_in_torch_file

    path = scratch / "pytorch_model.bin"
    tensor = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": tensor, "b": tensor[1:], "c": torch.ones(4, dtype=torch.float16)}, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    (pickled,) = (name for name in records if name.endswith("/data.pkl"))

    def read(kind: str, data: bytes) -> None:
        path.write_bytes(data)
        if kind == "pickle":
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in records.items():
                    archive.writestr(name, data if name == pickled else content)
        for stored in tensors_in_torch_file(path).values():
            stored.array()

    return one_of({"file": whole, "pickle": records[pickled]}, read)


@target
def foreign(scratch: Path) -> Loader:
    """Another exporter's decoder: its graph and its configuration are read, its weights are not."""
    from tests.support.tiny_models import write_decoder
    from topw_deploy.export.foreign import load_decoder
    from topw_deploy.export.source.resolve import resolve

    place = write_decoder(scratch / "decoder", "llama_tied")
    originals = {name: (place / name).read_bytes() for name in ("model.onnx", "config.json")}
    graph = originals["model.onnx"]
    genai = {"model": {"type": "llama", "context_length": 64, "decoder": {"filename": "model.onnx", "head_size": 8,
             "num_key_value_heads": 2, "sliding_window": {"window_size": 8},
             "session_options": {"custom_ops_library": "evil.so"}}}}  # fmt: skip

    def read(name: str, data: bytes) -> None:
        (place / "genai_config.json").unlink(missing_ok=True)
        for path, content in {**originals, name: data}.items():
            (place / path).write_bytes(content)
        source = resolve(str(place))
        assert source.onnx == place / "model.onnx"
        load_decoder(source.onnx, place)

    functions = nested_if(3) + function("f", ["g"]) + function("g", []) + call("f")
    return one_of({**originals, "model.onnx": [graph, functions], "genai_config.json": genai}, read)


@target
def config(scratch: Path) -> Loader:
    """A checkpoint's config.json, from which a model without values of weights is made."""
    from tests.support.tiny_models import write_checkpoint
    from topw_deploy.export.source.checkpoint import load_unread
    from topw_deploy.export.source.text_decoder import context_length, exported_config

    place = write_checkpoint(scratch / "llama", "llama_tied")
    seed = (place / "config.json").read_bytes()

    def read(data: bytes) -> None:
        (place / "config.json").write_bytes(data)
        model, *_ = load_unread(place, "float32")
        context_length(model.config)
        exported_config(place, json.loads(data))

    rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}
    text = {"model_type": "llama", "num_hidden_layers": 2}
    return Loader(read, (seed, as_bytes({**json.loads(seed), "text_config": text, "rope_scaling": rope})))


@target
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

    def of(settings: dict[str, Any], **tensors: tuple[str, list[int]]) -> bytes:
        named = {f"a.{name}": value for name, value in tensors.items()}
        return as_bytes({"config": {"model_type": "llama", "quantization_config": settings}, "tensors": named})

    word = {"qzeros": ("I32", [2, 1]), "scales": ("F16", [2, 8])}
    group = {"weights": {"num_bits": 4, "type": "int", "group_size": 4, "strategy": "group", "block_structure": [4, 4]}}
    compressed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group},
                  "sparsity_config": {"format": "dense"}, "ignore": ["lm_head"]}  # fmt: skip
    seeds = (
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
    )  # fmt: skip
    return Loader(read, seeds)


@target
def source_tokenizer(scratch: Path) -> Loader:
    """tekken.json, tiktoken's file and the tokenizer_config.json beside it, and SentencePiece's tokenizer.model."""
    from sentencepiece import SentencePieceTrainer
    from tokenizers import Tokenizer

    from topw_deploy.export.source.tokenizer import check_tokenizer, write_tokenizer

    ranks = [base64.b64encode(token).decode() for token in (*(bytes([byte]) for byte in range(256)), b"ab", b" a")]
    lines = "".join(f"{token} {rank}\n" for rank, token in enumerate(ranks)).encode()
    tekken = {
        "config": {"pattern": "\\p{L}+|.", "default_vocab_size": 262, "default_num_special_tokens": 4},
        "special_tokens": [{"rank": 0, "token_str": "<s>"}, {"rank": 1, "token_str": "</s>"}],
        "vocab": [{"rank": i, "token_bytes": token} for i, token in enumerate(ranks)],
    }
    stated = {"added_tokens_decoder": {"258": {"content": "<s>"}}, "bos_token": "<s>", "add_bos_token": True,
              "chat_template": [{"name": "default", "template": "a"}]}  # fmt: skip
    made = io.BytesIO()
    texts = ["def parse(text): return text", "a list of the words in the string", "the lazy dog"] * 20
    SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=made, vocab_size=48, model_type="bpe",
                               byte_fallback=False, minloglevel=3)  # fmt: skip
    beside = {"tokenizer_config.json": ("tiktoken.model", lines),
              "tokenizer.model": ("tokenizer_config.json", b'{"tokenizer_class": "LlamaTokenizer"}')}  # fmt: skip

    def read(name: str, data: bytes) -> None:
        folder, output = scratch / "source", scratch / "output"
        empty(folder, output)
        other, content = beside.get(name, (name, data))
        (folder / other).write_bytes(content)
        (folder / name).write_bytes(data)
        check_tokenizer(folder)
        write_tokenizer(folder, output)
        Tokenizer.from_file(str(output / "tokenizer.json")).encode("ab a")

    seeds = {"tekken.json": tekken, "tiktoken.model": lines, "tokenizer_config.json": stated}
    return one_of({**seeds, "tokenizer.model": made.getvalue()}, read)


@target
def arrays(scratch: Path) -> Loader:
    """.npy files of embeddings and of logits."""
    from topw_deploy.export.sampler_only import embeddings_of_file, median_distance_in_file
    from topw_deploy.sampling import Geometry

    path = scratch / "array.npy"
    rng = np.random.default_rng(0)
    geometry = Geometry.from_embeddings(rng.standard_normal((6, 3)).astype(np.float32), "cosine")

    def read(kind: str, data: bytes) -> None:
        path.write_bytes(data)
        if kind == "logits":
            median_distance_in_file(path, geometry, 6)
        else:
            Geometry.from_embeddings(embeddings_of_file(path), "cosine")

    def seed(array: np.ndarray) -> bytes:
        made = io.BytesIO()
        np.save(made, array)
        return made.getvalue()

    table, logits = rng.standard_normal((6, 3)), rng.standard_normal((4, 6)).astype(np.float32)
    return one_of({"embeddings": [seed(table.astype(np.float16)), seed(table)], "logits": seed(logits)}, read)


@target
def prompts(_scratch: Path) -> Loader:
    """Files of prompts and of questions."""
    from topw_deploy.cli.prompts import read_prompt_lines
    from topw_lab.judges import read_questions

    def read(kind: str, data: bytes) -> None:
        if kind != "prompts":
            read_questions(data, "in", kind)
            return
        for line in read_prompt_lines(data, "in", {}, chat=False, system=None):
            line.digest({})

    seeds = {
        "prompts": [
            b'"text"\n{"prompt_ids": [1, 2], "seed": 3, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1}}',
            b'{"messages": [{"role": "user", "content": "a"}], "id": 7, "structured_outputs": {"regex": "a+"}}',
        ],
        "alpaca_eval": b'[{"instruction": "a", "dataset": "b"}]',
        "mt_bench": b'{"question_id": 1, "turns": ["a", "b"]}',
    }
    return one_of(seeds, read)


@target
def bodies(scratch: Path) -> Loader:
    """Bodies of HTTP requests to a server with a toy model. A status of 500 or more but 503 is a finding."""
    from starlette.testclient import TestClient

    from topw_deploy.serve.app import create_app
    from topw_deploy.serve.service import ServeOptions

    place = export(scratch / "toy", Toy.random(3), form="grouped", with_logits=True, chat_template=TEMPLATE)
    opening: dict[str, Any] = {"provider": "cpu", "intra_op_num_threads": 1}
    client = TestClient(create_app(ServeOptions(models={"toy": place}, opening=opening)), raise_server_exceptions=False)
    client.__enter__()
    while client.get("/health").status_code != 200:
        pass
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    common = {"temperature": 0.5, "seed": 1, "max_tokens": 2, "stop": ["x"], "top_p": 0.9, "rule": "top_p"}
    seeds = {
        "/v1/chat/completions": [
            {**chat, **common, "tools": [{"type": "function", "function": {"name": "f"}}]},
            {**chat, "response_format": {"type": "json_object"}, "logprobs": True},
            {**chat, "stream": True, "stream_options": {"include_usage": True}},
        ],
        "/v1/completions": {"prompt": ["a", "b"], **common, "n": 2, "logit_bias": {"5": 1.5}, "logprobs": 1,
                            "echo": False},
        "/v1/responses": {"input": "a", "max_output_tokens": 2},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [3, 4]},
        "/topw/inspect": {"prompt_token_ids": [3, 4], "token_ids": [5, 6], "position": 1, **common,
                          "repetition_penalty": 1.2},
    }  # fmt: skip

    def read(path: str, data: bytes) -> None:
        response = client.post(path, content=data)
        assert response.status_code < 500 or response.status_code == 503, response.text[:200]
        assert "internal_error" not in response.text
        if response.status_code >= 400:
            raise PromptError(response.json()["error"]["message"])

    return one_of(seeds, read)


@target
def triton(scratch: Path) -> Loader:
    """Triton's inputs for an engine with a toy model; the bits of the first byte of an input choose which there are."""
    import asyncio

    from topw_deploy.engine import Engine
    from topw_deploy.runtime import TopWModel
    from topw_deploy.triton.repository import read_request, response_outputs

    place = export(scratch / "toy", Toy.random(3), form="grouped", chat_template=TEMPLATE)
    engine = Engine(TopWModel.from_pretrained(place, provider="cpu", intra_op_num_threads=1), max_batch=2)
    loop = asyncio.new_event_loop()

    async def ask(inputs: dict[str, np.ndarray]) -> None:
        prompt, bounded, streams = read_request(inputs.get)
        if isinstance(bounded.get("max_new_tokens"), int):
            bounded["max_new_tokens"] = min(bounded["max_new_tokens"], 4)
        bounded.setdefault("max_new_tokens", 2)
        async for _ in response_outputs(engine, prompt, bounded, streams):
            pass

    def read(data: bytes) -> None:
        kind, rest = data[:1] or b"\0", data[1:]
        inputs: dict[str, np.ndarray] = {}
        if kind[0] & 1:
            inputs["input_ids"] = np.frombuffer(rest[: len(rest) // 8 * 8][:64], np.int64)
        else:
            inputs["text_input"] = np.array([b"ab" if kind[0] & 4 else rest], np.object_)
        if kind[0] & 2:
            inputs["parameters"] = np.array([rest], np.object_)
        if kind[0] & 8:
            inputs["seed"] = np.frombuffer(rest[:8].ljust(8), np.uint64)
        if kind[0] & 16:
            inputs["stream"] = np.array([[True]])
        loop.run_until_complete(ask(inputs))

    parameters = {"temperature": 0.5, "lam": 0.2, "max_new_tokens": 2, "stop": ["x"], "logit_bias": {"5": 1.5},
                  "structured_outputs": {"regex": "a+"}, "num_return_sequences": 2, "rule": "top_p", "top_p": 0.9,
                  "logprobs": 1, "bad_words_ids": [[1, 2]], "eos_token_id": [1]}  # fmt: skip
    written, ids = as_bytes(parameters), np.array([3, 4, 5], np.int64).tobytes()
    return Loader(read, (b"\6" + written, b"\x16" + written, b"\x0dabcdefgh", b"\1" + ids, b"\0text"))
