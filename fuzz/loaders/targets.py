"""The loaders: seeds of each, and how it reads an input."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.attacks import call, function, nested_if, put, safetensors
from tests.support.toy_model import Toy, export
from topw_deploy.errors import PromptError, TopWError
from topw_deploy.manifest import MANIFEST_NAME, DecoderManifest, load_decoder_manifest, manifest_from_json

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% if not loop.last %}{{ '\\n' * 2 }}{% endif %}{% endfor %}"
    "{% set ns = namespace(x='a') %}{% for i in range(3) %}{% set ns.x = ns.x ~ i %}{% endfor %}{{ ns.x }}"
    "{% macro f(n) %}{{ f(n - 1) if n else '' }}{% endmacro %}{{ f(2) }}{{ {'a': [1, 2.5]} | tojson(indent=2) }}"
    "{% if add_generation_prompt %}{{ '%s:%d' % ('a', 1) }}{{ '{0}{a}'.format(1, a=2) }}{% endif %}"
)
_MESSAGES = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "x" * 100}]


@dataclass(frozen=True)
class Loader:
    """read: reads an input; raises TopWError for what it refuses. seeds: inputs, most of them valid."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


Maker = Callable[[Path], Loader]
"""Makes a loader whose files are in a folder of its own."""


def manifest(scratch: Path) -> Loader:
    folder = _exported(scratch)

    def read(data: bytes) -> None:
        (folder / MANIFEST_NAME).write_bytes(data)
        found = load_decoder_manifest(folder)
        assert manifest_from_json(found.to_json()) == found

    return Loader(read, ((folder / MANIFEST_NAME).read_bytes(),))


def folder(scratch: Path) -> Loader:
    """The first byte chooses the file. onnxruntime does not run: it is no part of this package."""
    from topw_deploy.runtime.chat import load_template
    from topw_deploy.runtime.folder import ModelFolder
    from topw_deploy.runtime.generation_config import bos_token, model_defaults
    from topw_deploy.runtime.tokenizer import Tokenizer

    place = _exported(scratch)
    names = ("generation_config.json", "config.json", "tokenizer_config.json", "special_tokens_map.json")
    contents = {
        "generation_config.json": {"eos_token_id": [1], "temperature": 0.5, "rule": "top_p", "top_p": 0.9, "beta": 2.5},
        "config.json": {"model_type": "toy", "text_config": {"eos_token_id": [1], "bos_token_id": 0}},
        "tokenizer_config.json": {"eos_token": {"content": "</s>"}, "chat_template": [
            {"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    }  # fmt: skip
    original = (place / MANIFEST_NAME).read_bytes()

    def read(data: bytes) -> None:
        if not data:
            return
        (place / MANIFEST_NAME).write_bytes(original)
        put(place, names[data[0] % len(names)], data[1:])
        opened = ModelFolder(place, DecoderManifest)
        tokenizer = Tokenizer(opened)
        model_defaults(opened, tokenizer)
        bos_token(opened, tokenizer)
        template = load_template(opened, tokenizer)
        if template is not None:
            template.render(_MESSAGES)

    seeds = tuple(bytes([index]) + json.dumps(contents[name]).encode() for index, name in enumerate(names))
    return Loader(read, seeds)


def tokenizer(scratch: Path) -> Loader:
    from tests.runtime.test_folder_fuzz import SMALL_TOKENIZER
    from topw_deploy.runtime.folder import ModelFolder
    from topw_deploy.runtime.tokenizer import Tokenizer

    place = _exported(scratch)
    original = (place / MANIFEST_NAME).read_bytes()

    def read(data: bytes) -> None:
        (place / MANIFEST_NAME).write_bytes(original)
        put(place, "tokenizer.json", data)
        found = Tokenizer(ModelFolder(place, DecoderManifest))
        ids = found.encode("Hello <s> ab\n\u00e9" + "a" * 200)
        found.decode([*ids, 0, 1, 2, 999])
        follow = found.follow(ids)
        for token in (0, 1, 2, 3):
            follow.push(token)
        follow.flush()
        assert found.bound.characters is None or found.bound.characters >= 0

    normalizers = {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": " "}, "content": "_"}, {"type": "NFKC"},
        {"type": "Prepend", "prepend": "_"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]}  # fmt: skip
    unigram = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["a", -1.0], ["ab", -2.5]],
        "byte_fallback": False,
    }
    pieces = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
              "vocab": {"a": 0, "##b": 1}}  # fmt: skip
    others = ({"normalizer": normalizers}, {"model": unigram}, {"model": pieces, "post_processor": None})
    return Loader(read, tuple(json.dumps({**SMALL_TOKENIZER, **other}).encode() for other in ({}, *others)))


def template(_scratch: Path) -> Loader:
    from topw_deploy.runtime.chat import ChatTemplate

    published = Path(__file__).parents[2] / "tests" / "runtime" / "template" / "templates"
    seeds = [
        path.read_bytes() for path in sorted(published.rglob("*")) if path.is_file() and path.stat().st_size < 20_000
    ]

    def read(data: bytes) -> None:
        source = data.decode("utf-8", "replace")
        made = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
        made.render(_MESSAGES, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])

    return Loader(read, (TEMPLATE.encode(), *seeds))


def session(scratch: Path) -> Loader:
    from tests.engine.test_session_file import FORM, TOKENS, states_of
    from topw_deploy.engine.session_file import read_session, write_session

    path = scratch / "session"
    write_session(path, FORM, TOKENS, states_of(5))
    seed = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_session(path, FORM)

    return Loader(read, (seed, _reheaded(seed)))


def _reheaded(data: bytes) -> bytes:
    """The header alone, whose length is right, for changes of its JSON."""
    (length,) = struct.unpack("<Q", data[:8])
    return data[: 8 + length]


def checkpoint(scratch: Path) -> Loader:
    """The first byte chooses between a file and an index."""
    from topw_deploy.export.source.safetensors_files import INDEX, SINGLE, stored_tensors

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

    from topw_deploy.export.source.torch_files import tensors_in_torch_file

    path = scratch / "pytorch_model.bin"
    torch.save({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.float16)}, path)
    seed = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for stored in tensors_in_torch_file(path).values():
            stored.array()

    return Loader(read, (seed,))


def graph(scratch: Path) -> Loader:
    """`topw check` and the builder of engines read graphs without onnxruntime."""
    from topw_deploy.tensorrt.check import check

    place = _exported(scratch)
    original = (place / MANIFEST_NAME).read_bytes()
    whole = (place / "model.onnx").read_bytes()
    inner = whole + nested_if(3) + function("f", ["g"]) + function("g", []) + call("f")

    def read(data: bytes) -> None:
        (place / MANIFEST_NAME).write_bytes(original)
        put(place, "model.onnx", data)
        for target in ("tensorrt", "onnxruntime"):
            check(place, target, ask=False)

    return Loader(read, (inner[-30_000:], nested_if(3) + function("f", ["g"]) + function("g", []) + call("f")))


def foreign(scratch: Path) -> Loader:
    """Another exporter's decoder, without its weights; what is valid is read as far as its configuration."""
    from tests.support.tiny_models import write_decoder
    from topw_deploy.export.foreign.load import load_decoder

    place = write_decoder(scratch / "decoder", "llama_tied")
    whole = (place / "model.onnx").read_bytes()

    def read(data: bytes) -> None:
        (place / "model.onnx").write_bytes(data)
        load_decoder(place / "model.onnx", place)

    return Loader(read, (whole, nested_if(3) + function("f", ["g"]) + function("g", []) + call("f")))


def stamp(scratch: Path) -> Loader:
    from topw_deploy.tensorrt.stamp import read as read_stamp

    path = scratch / "gpu.json"
    sizes = {"least": 1, "usual": 2, "most": 4}
    whole = {
        "engine": "gpu.engine", "size": 5, "sha256": "0" * 64, "manifest": "0" * 64, "tensorrt": "10.16", "gpu": "G",
        "sm": 90, "plugin": "none", "plugin_version": "", "precision": "fp16", "cache_length": 64, "workspace": None,
        "profiles": [{"name": "p", "batch": sizes, "sequence": sizes, "edits": sizes}], "topw_deploy": "0.1",
        "format_version": 1,
    }  # fmt: skip

    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert read_stamp(path).most_batch >= 0

    return Loader(read, (json.dumps(whole).encode(),))


def prompts(_scratch: Path) -> Loader:
    """Files of prompts, of statistics and of questions. The first byte chooses."""
    from topw_deploy.cli.judge_files import read_questions
    from topw_deploy.cli.prompt_lines import prompt_lines
    from topw_deploy.stats.request import prompts_of_json_lines

    def lines(data: bytes) -> None:
        for line in prompt_lines(data, "in", {}, chat=False, system=None):
            line.request({})

    readers: tuple[Callable[[bytes], object], ...] = (
        lines,
        lambda data: prompts_of_json_lines(data, "in"),
        lambda data: read_questions(data, "in", "alpaca_eval"),
        lambda data: read_questions(data, "in", "mt_bench"),
    )
    seeds = (
        b'\0"text"\n{"prompt_ids": [1, 2], "seed": 3, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1}}',
        b'\0{"messages": [{"role": "user", "content": "a"}], "id": 7, "structured_outputs": {"regex": "a+"}}',
        b'\1{"prompt": "a"}',
        b'\2[{"instruction": "a", "dataset": "b"}]',
        b'\3{"question_id": 1, "turns": ["a", "b"]}',
    )
    return Loader(lambda data: readers[data[0] % 4](data[1:]) if data else None, seeds)


def bodies(scratch: Path) -> Loader:
    """Bodies of HTTP requests to a server over a toy model; a status of 500 is a finding. The first byte chooses."""
    from starlette.testclient import TestClient

    from topw_deploy.serve.app import create_app
    from topw_deploy.serve.settings import Settings

    place = export(scratch / "toy", Toy.random(3), form="grouped", with_logits=True, chat_template=TEMPLATE)
    opening: dict[str, Any] = {"provider": "cpu", "intra_op_num_threads": 1}
    client = TestClient(create_app(Settings(models={"toy": place}, opening=opening)), raise_server_exceptions=False)
    client.__enter__()
    while client.get("/health").status_code != 200:
        pass
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
    message = {"role": "user", "content": "Hi"}
    common = {"temperature": 0.5, "seed": 1, "max_tokens": 2, "stop": ["x"], "top_p": 0.9, "rule": "top_p"}
    seeds = (
        (0, {"messages": [message], **common, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (0, {"messages": [message], "max_tokens": 2, "response_format": {"type": "json_object"}, "logprobs": True}),
        (0, {"messages": [message], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
        (1, {"prompt": ["a", "b"], **common, "n": 2, "logit_bias": {"5": 1.5}, "logprobs": 1, "echo": False}),
        (2, {"input": "a", "max_output_tokens": 2}),
        (3, {"prompt": "a"}),
        (4, {"tokens": [3, 4]}),
    )

    def read(data: bytes) -> None:
        if data:
            response = client.post(paths[data[0] % len(paths)], content=data[1:])
            assert response.status_code < 500 or response.status_code == 503, (
                response.status_code,
                response.text[:200],
            )
            assert "internal_error" not in response.text
            if response.status_code >= 400:
                raise PromptError(response.json()["error"]["message"])

    return Loader(read, tuple(bytes([path]) + json.dumps(body).encode() for path, body in seeds))


LOADERS: dict[str, Maker] = {
    each.__name__.replace("_", "-"): each
    for each in (
        manifest, folder, tokenizer, template, session, checkpoint, torch_file, graph, foreign, stamp, prompts, bodies,
    )
}  # fmt: skip


def refusal(loader: Loader, data: bytes) -> TopWError | None:
    """The error of an input that is refused. Other errors leave this function: they are findings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loader.read(data)
        except TopWError as error:
            return error
    return None


def _exported(scratch: Path) -> Path:
    return export(scratch / "export", Toy.random(2), generation_config={"eos_token_id": 1}, chat_template=TEMPLATE)
