"""examples/cpp reports wrong folders, requests and command lines in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from msgspec.structs import replace

from tests.examples.cpp_host import Host, fails, host_of, ids_of
from tests.support.toy_model import VOCAB, Toy, export_sampler
from topw_deploy.manifest import MANIFEST_NAME, describe_files, load_manifest, save_manifest

pytestmark = pytest.mark.slow

NOT_JSON = (
    "", "{", "[1, 2", '{"a": 1,}', '{"a" 1}', '{"a": 01}', '{"a": 1.}', '{"a": NaN}', '{"a": .5}', "{'a': 1}",
    '{"a": 1} 2', '{"a": 1, "a": 2}', '{"a": "\\x"}', '{"a": "\\u12"}', '{"a": "\\ud800"}', '{"a": "\\udc00\\ud800"}',
    '{"a": "\n"}', '{"a": "', "nul", "[" * 100, '{"a": -}', '{"a": 1e}', "{1: 2}", "\ufeff{}",
)  # fmt: skip


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
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
        (["format_version"], 2, "format_version is 2, but must be 1"),
        (["kind"], "engine", "kind is 'engine'"),
        (["decoder"], None, "has no decoder"),
        (["decoder", "kv_form"], "shared", "kv_form is 'shared', but must be 'static' or 'concat'"),
        (["decoder", "states", 0, "dtype"], "int64", "dtype is 'int64'"),
        (["decoder", "states", 0, "shape", 0], 2.5, "is 2.5, but must be an integer"),
        (["decoder", "most_columns"], 64, "reads a prompt in one run"),
        (["decoder", "context_length"], True, "context_length is true"),
        (["verification", "status"], "provisional", "status is 'provisional'"),
        (["defaults", "lam"], "much", "lam is 'much', but must be a number"),
        (["inputs", 0, "dtype"], "float", "input_ids is not the same in model.onnx"),
        (["files", "model.onnx", "size"], 7, "model.onnx is listed"),
        (["files", "../model.onnx"], {"size": 1, "sha256": ""}, "../model.onnx is listed"),
        (["files", "absent.txt"], {"size": 1, "sha256": ""}, "absent.txt is listed"),
    ],
)
def test_a_manifest_that_contradicts_the_files_is_refused(
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


def test_a_missing_folder_is_refused(host: Host, tmp_path: Path) -> None:
    fails(host(tmp_path / "nowhere", 5), 1, "nowhere is not a folder")
    fails(host(tmp_path, 5), 1, f"has no {MANIFEST_NAME}")
    fails(host(export_sampler(tmp_path / "sampler", Toy.random()), 5), 1, "kind is 'sampler'")


def test_a_listed_file_that_is_a_link_is_refused(host: Host, folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "model.onnx", tmp_path / "elsewhere.onnx")
    (folder / "model.onnx").symlink_to(tmp_path / "elsewhere.onnx")
    fails(host(folder, 5), 1, "model.onnx is listed", "a link")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([VOCAB], 1, f"the token id {VOCAB}, but ids go from 0 to {VOCAB - 1}"),
        (["--native-library", "/nowhere.so", 5], 1, "/nowhere.so does not load"),
        ([], 1, "the prompt is empty"),
        (["five"], 2, "'five' is not a token id"),
        (["--topp", 0.9, 5], 2, "--topp is not an option"),
        (["--temperature", -1, 5], 2, "--temperature is '-1', but must be a finite number >= 0"),
        (["--beta", "1e39", 5], 2, "in float32 too"),
        (["--init-top-p", "1e-60", 5], 2, "--init-top-p is '1e-60', but must be in (0, 1]"),
        (["--seed", 2**64, 5], 2, f"--seed is '{2**64}', but must be an integer in [0, {2**64 - 1}]"),
        (["--provider", "tpu", 5], 2, "--provider is 'tpu', but must be cpu or cuda"),
        (["--prompt", "text"], 2, "--prompt needs a tokenizer; name its library with --tokenizer-library"),
        (["--stop", "text", 5], 2, "--stop needs a tokenizer"),
        (["--stop", "", 5], 2, "--stop is empty or not UTF-8"),
        (["--no-add-special-tokens", 5], 2, "--no-add-special-tokens needs a tokenizer"),
        (["--batch", 5], 2, "prompts are given in two ways"),
        (["--repetition-penalty", "1e-60", 5], 2, "> 0, in float32 too"),
        (["--min-new-tokens", 1.5, 5], 2, "--min-new-tokens is '1.5'"),
        (["--logit-bias", 5, 5], 2, "--logit-bias is '5', but must be ID=BIAS"),
        (["--logit-bias", "5=inf", 5], 2, "--logit-bias is 'inf', but must be a number below infinity"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2", 5], 2, "--logit-bias names the token id 5 twice"),
        (["--logit-bias", f"{VOCAB}=1", 5], 1, f"logit_bias names the token id {VOCAB}, but ids go from 0"),
        (["--suppress-tokens", "3,,4", 5], 2, "--suppress-tokens is '', but must be an integer"),
        (["--bad-words-ids", "", 5], 2, "--bad-words-ids is ''"),
    ],
)
def test_an_invalid_command_line_is_refused(
    arguments: list[object], code: int, words: str, host: Host, folders: dict[str, Path]
) -> None:
    fails(host(folders["grouped"], *arguments), code, words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "standard input has no request"),
        ("[5]", "request 0 is a list, but must be an object with a prompt"),
        ("{", "request 0 is not JSON (byte 1"),
        ('{"prompt": [5]} {"prompt": [5]}', "request 0 is not JSON (byte 16: something follows the value); correct"),
        ('{"prompt": [5]}\n{"seed": 1}', "request 1 has no prompt; correct the request"),
        ('{"prompt": []}', "the prompt is empty and the model states no BOS token"),
        ('{"prompt": [5]}\n{"prompt": [-5]}', "prompt 1 holds the token id -5, but ids go from 0"),
        ('{"prompt": "text"}', "prompt is 'text', but must be a list of token ids where there is no --tokenizer-lib"),
        ('{"prompt": [5], "stop_strings": "x"}', "request 0 has stop strings, which need a tokenizer"),
        ('{"prompt": [5], "stop_strings": ["x", ""]}', "stop_strings is a list, but must be a text that is not empty"),
        ('{"prompt": [5], "top_p": 0.9}', "request 0 states 'top_p', which is not a parameter"),
        ('{"prompt": [5], "num_return_sequences": 2}', "'num_return_sequences', which is not a parameter of a row"),
        ('{"prompt": [5], "temperature": "warm"}', "temperature is 'warm', but must be a number"),
        ('{"prompt": [5], "temperature": 0, "do_sample": true}', "do_sample is true, but the temperature is 0"),
        ('{"prompt": [5], "seed": 18446744073709551616}', "seed is 1.84467440737096e+19"),
        ('{"prompt": [5], "max_new_tokens": 0}', "max_new_tokens is 0, but must be an integer in [1, "),
        ('{"prompt": [5], "max_new_tokens": 1, "max_length": 9}', "max_new_tokens and max_length are both given"),
        ('{"prompt": [5, 6], "max_length": 2}', "the prompt has 2 tokens, but max_length is 2; raise it"),
        ('{"prompt": [5], "logit_bias": {"x": 1}}', "logit_bias names 'x', but must name token ids"),
        ('{"prompt": [5], "logit_bias": {"5": 1, "05": 2}}', "logit_bias names the token id 5 twice"),
        (
            '{"prompt": [5], "max_tokens": 1, "max_new_tokens": 2}',
            "states max_new_tokens twice, once as max_new_tokens",
        ),
        ('{"prompt": [5], "logit_bias": [1]}', "logit_bias is a list, but must be an object"),
        ('{"prompt": [5], "bad_words_ids": [5]}', "bad_words_ids 0 is 5, but must be a list of token ids"),
        ('{"prompt": [5], "suppress_tokens": [-3]}', "suppress_tokens 0 is -3, but must be an integer"),
    ],
)
def test_a_batch_with_an_invalid_request_is_refused(
    line: str, words: str, host: Host, folders: dict[str, Path]
) -> None:
    fails(host(folders["grouped"], "--batch", stdin=line), 1, words)


def test_onnxruntimes_errors_are_passed_on(
    program: Path, ort_library: Path, host: Host, folder: Path, tmp_path: Path
) -> None:
    fails(host_of(program, tmp_path / "none.so")(folder, 5), 1, "onnxruntime cannot be opened", "--onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        fails(host(folder, "--provider", "cuda", 5), 1, "give one that does with --onnxruntime, or --provider cpu")
    size = (folder / "model.onnx").stat().st_size
    (folder / "model.onnx").write_bytes(b"\xff" * size)
    fails(host(folder, 5), 1, f"onnxruntime {ort.__version__} refuses ")
