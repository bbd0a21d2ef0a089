"""What is wrong with a folder, a model or a command line, examples/cpp/topw_host.cpp says in one sentence."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from cpp_host import Host, fails, host_of, ids_of

from topw_deploy.manifest import MANIFEST_NAME, describe_files, load_manifest, save_manifest
from toy_model import VOCAB, Toy, export_sampler

NOT_JSON = (
    "", "{", "[1, 2", '{"a": 1,}', '{"a" 1}', '{"a": 01}', '{"a": 1.}', '{"a": NaN}', '{"a": .5}', "{'a': 1}",
    '{"a": 1} 2', '{"a": 1, "a": 2}', '{"a": "\\x"}', '{"a": "\\u12"}', '{"a": "\\ud800"}', '{"a": "\\udc00\\ud800"}',
    '{"a": "\n"}', '{"a": "', "nul", "[" * 100, '{"a": -}', '{"a": 1e}', "{1: 2}", "\ufeff{}",
)  # fmt: skip


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(folders["concat"], tmp_path / "export"))


def change_manifest(folder: Path, *keys: str | int, value: Any) -> None:
    data = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (folder / MANIFEST_NAME).write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize("text", NOT_JSON)
def test_a_manifest_that_is_not_json_is_refused(text: str, host: Host, folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")
    fails(host(folder, 5), 1, f"{MANIFEST_NAME} is not JSON (byte ")


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (["format_version"], 1, "format_version is 1, but must be 2"),
        (["format_version"], 3, "format_version is 3, but must be 2"),
        (["format_version"], "2", "format_version is '2', but must be an integer"),
        (["kind"], "engine", "kind is 'engine'"),
        (["decoder"], None, "has no decoder"),
        (["decoder"], [], "has no kv_form"),
        (["decoder", "kv_form"], "shared", "kv_form is 'shared', but must be 'static' or 'concat'"),
        (["decoder", "kv_dtype"], "int64", "kv_dtype is 'int64'"),
        (["decoder", "num_layers"], 2.5, "num_layers is 2.5, but must be an integer"),
        (["decoder", "num_kv_heads"], [1], "number of heads"),
        (["decoder", "head_dim", 1], 0, "head_dim 1 is 0"),
        (["decoder", "context_length"], True, "context_length is true"),
        (["verification", "status"], "provisional", "status is 'provisional'"),
        (["defaults", "init_top_p"], 0, "init_top_p is 0, but must be in (0, 1]"),
        (["defaults", "lam"], "much", "lam is 'much', but must be a number"),
        (["inputs", 0, "dtype"], "complex", "dtype is 'complex'"),
        (["inputs", 0, "dtype"], "float", "input_ids is not the same in model.onnx"),
        (["inputs", 0, "name"], "tokens", "is not the same in model.onnx"),
        (["files", "model.onnx", "size"], 7, "model.onnx is listed"),
        (["files"], [], "has no model.onnx"),
        (["files", "../model.onnx"], {"size": 1, "sha256": ""}, "../model.onnx is listed"),
        (["files", "/etc/passwd"], {"size": 1, "sha256": ""}, "/etc/passwd is listed"),
        (["files", "absent.txt"], {"size": 1, "sha256": ""}, "absent.txt is listed"),
    ],
)
def test_a_manifest_that_states_what_is_not_so_is_refused(
    keys: list[str | int], value: Any, words: str, host: Host, folder: Path
) -> None:
    change_manifest(folder, *keys, value=value)
    fails(host(folder, 5), 1, words)


def test_names_beyond_ascii_are_read_escaped_or_not(host: Host, folder: Path) -> None:
    name = 'Größe "ﬀ" 😀\t.txt'
    (folder / name).write_text("x", encoding="utf-8")
    manifest = load_manifest(folder)
    save_manifest(folder, replace(manifest, files={**manifest.files, **describe_files(folder, [name])}))
    for escaped in (False, True):
        text = json.dumps(json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8")), ensure_ascii=escaped)
        assert text.isascii() == escaped
        (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")
        assert len(ids_of(host(folder, "--max-new-tokens", 2, 50))) == 2
    (folder / name).write_text("xy", encoding="utf-8")
    fails(host(folder, 50), 1, "of another size")


def test_a_folder_that_is_none_is_refused(host: Host, tmp_path: Path) -> None:
    fails(host(tmp_path / "nowhere", 5), 1, "nowhere is not a folder")
    fails(host(tmp_path, 5), 1, f"has no {MANIFEST_NAME}")
    fails(host(export_sampler(tmp_path / "sampler", Toy.random()), 5), 1, "kind is 'sampler'")


def test_links_are_refused(host: Host, folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "model.onnx", tmp_path / "elsewhere.onnx")
    (folder / "model.onnx").symlink_to(tmp_path / "elsewhere.onnx")
    fails(host(folder, 5), 1, "model.onnx is listed", "a link")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([VOCAB], 1, f"the token id {VOCAB}, but ids go from 0 to {VOCAB - 1}"),
        ([-1], 1, "the token id -1"),
        (["--native-library", "/nowhere.so", 5], 1, "/nowhere.so does not load"),
        ([], 1, "the prompt is empty"),
        (["five"], 2, "'five' is not a token id"),
        (["5.0"], 2, "'5.0' is not a token id"),
        (["--topp", 0.9, 5], 2, "--topp is not an option"),
        (["--temperature", -1, 5], 2, "--temperature is '-1', but must be a finite number >= 0"),
        (["--temperature", "warm", 5], 2, "--temperature is 'warm'"),
        (["--lam", "nan", 5], 2, "--lam is 'nan'"),
        (["--beta", "1e39", 5], 2, "in float32 too"),
        (["--init-top-p", "1e-60", 5], 2, "--init-top-p is '1e-60', but must be in (0, 1]"),
        (["--seed", 2**64, 5], 2, f"--seed is '{2**64}', but must be an integer in [0, {2**64 - 1}]"),
        (["--threads", 1025, 5], 2, "--threads is '1025'"),
        (["--max-new-tokens", -1, 5], 2, "--max-new-tokens is '-1'"),
        (["--provider", "tpu", 5], 2, "--provider is 'tpu', but must be cpu or cuda"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(
    arguments: list[object], code: int, words: str, host: Host, folders: dict[str, Path]
) -> None:
    fails(host(folders["grouped"], *arguments), code, words)


def test_what_onnxruntime_says_is_passed_on(
    program: Path, ort_library: Path, host: Host, folder: Path, tmp_path: Path
) -> None:
    fails(host_of(program, tmp_path / "none.so")(folder, 5), 1, "onnxruntime cannot be opened", "--onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        fails(host(folder, "--provider", "cuda", 5), 1, "give one that does with --onnxruntime, or --provider cpu")
    size = (folder / "model.onnx").stat().st_size
    (folder / "model.onnx").write_bytes(b"\xff" * size)
    fails(host(folder, 5), 1, f"onnxruntime {ort.__version__} refuses ")
