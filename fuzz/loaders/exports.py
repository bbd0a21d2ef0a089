"""The loaders of exported folders, and of files beside them: sessions, and stamps of built engines."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from fuzz.loaders.loader import MESSAGES, TEMPLATE, Loader, exported
from tests.support.attacks import put
from tests.support.toy_model import Toy, export_sampler
from topw_deploy.manifest import MANIFEST_NAME, DecoderManifest, manifest_from_json


def manifest(scratch: Path) -> Loader:
    """The manifests of a decoder and of a sampler alone."""
    folders = (exported(scratch), export_sampler(scratch / "sampler", Toy.random(2)))

    def read(data: bytes) -> None:
        found = manifest_from_json(data)
        assert manifest_from_json(found.to_json()) == found

    return Loader(read, tuple((folder / MANIFEST_NAME).read_bytes() for folder in folders))


def folder(scratch: Path) -> Loader:
    """Files of an exported folder but the graph; the first byte of an input chooses which.

    onnxruntime, which is no part of this package, does not run.
    """
    from topw_deploy.manifest import ModelFolder
    from topw_deploy.runtime.chat import load_chat_template
    from topw_deploy.runtime.prepare import read_bos_token_id, read_model_defaults
    from topw_deploy.runtime.tokenizer import Tokenizer

    place = exported(scratch)
    names = ("generation_config.json", "config.json", "tokenizer_config.json", "special_tokens_map.json")
    contents = {
        "generation_config.json": {"eos_token_id": [1], "temperature": 0.5, "rule": "top_p", "top_p": 0.9, "beta": 2.5},
        "config.json": {"model_type": "toy", "text_config": {"eos_token_id": [1], "bos_token_id": 0}},
        "tokenizer_config.json": {"eos_token": {"content": "</s>"}, "chat_template": [
            {"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    }  # fmt: skip
    originals = {path: path.read_bytes() for path in place.iterdir() if path.name in (*names, MANIFEST_NAME)}

    def read(data: bytes) -> None:
        if not data:
            return
        for path, original in originals.items():
            path.write_bytes(original)
        put(place, names[data[0] % len(names)], data[1:])
        opened = ModelFolder(place, DecoderManifest)
        tokenizer = Tokenizer(opened)
        read_model_defaults(opened, tokenizer)
        read_bos_token_id(opened, tokenizer)
        template = load_chat_template(opened, tokenizer)
        if template is not None:
            template.render(MESSAGES)

    seeds = tuple(bytes([index]) + json.dumps(contents[name]).encode() for index, name in enumerate(names))
    return Loader(read, seeds)


def tokenizer(scratch: Path) -> Loader:
    from tests.runtime.test_folder_fuzz import SMALL_TOKENIZER
    from topw_deploy.manifest import ModelFolder
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

    published = Path(__file__).parents[2] / "tests" / "runtime" / "templates"
    seeds = [path.read_bytes() for path in sorted(published.iterdir())]

    def read(data: bytes) -> None:
        source = data.decode("utf-8", "replace")
        made = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
        made.render(MESSAGES, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])

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

    return Loader(read, (seed, _header_only(seed)))


def _header_only(data: bytes) -> bytes:
    """The session file without its data. Changes of the JSON then keep the header's length right."""
    (length,) = struct.unpack("<Q", data[:8])
    return data[: 8 + length]


def stamp(scratch: Path) -> Loader:
    from topw_deploy.tensorrt.stamp import read_stamp

    path = scratch / "gpu.json"
    sizes = {"least": 1, "usual": 2, "most": 4}
    whole = {
        "engine": "gpu.engine", "size": 5, "sha256": "0" * 64, "manifest": "0" * 64, "tensorrt": "10.16", "gpu": "G",
        "sm": 90, "plugin": "", "precision": "fp16", "cache_length": 64, "workspace": None,
        "profiles": [{"name": "p", "batch": sizes, "sequence": sizes, "edits": sizes}], "topw_deploy": "0.1",
        "format_version": 1,
    }  # fmt: skip

    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert read_stamp(path).most_batch >= 0

    return Loader(read, (json.dumps(whole).encode(),))
