"""Opening reads only the folder, and gives one clear error."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from tests.support.attacks import put
from tests.support.editing import edit_json
from tests.support.mutations import mutations
from tests.support.toy_model import Toy, byte_tokenizer, export, export_sampler
from topw_deploy.errors import ManifestError, TokenizerError, TopWError
from topw_deploy.manifest import MANIFEST_NAME
from topw_deploy.runtime import TopWModel, TopWSampler
from topw_deploy.runtime.ort import graph_session


@pytest.fixture
def folder(toy_folder: Path, tmp_path: Path) -> Path:
    """A copy to modify."""
    return Path(shutil.copytree(toy_folder, tmp_path / "copy"))


def load(folder: Path, **settings: Any) -> TopWModel:
    return TopWModel.from_pretrained(folder, provider="cpu", **settings)


def test_a_missing_folder_a_file_and_an_unfinished_export_have_errors_of_their_own(folder: Path) -> None:
    with pytest.raises(ManifestError, match="does not exist; give the folder that topw-export wrote"):
        load(folder / "nowhere")
    with pytest.raises(ManifestError, match="is a file; give the folder that topw-export wrote"):
        load(folder / "model.onnx")
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(ManifestError, match="not a finished export"):
        load(folder)


@pytest.mark.parametrize(
    "content", [b"", b"not onnx", os.urandom(4096), b"\x00" * 100], ids=["empty", "text", "random", "zeros"]
)
def test_a_file_that_is_not_a_graph_is_refused(folder: Path, content: bytes) -> None:
    put(folder, "model.onnx", content)
    with pytest.raises(ManifestError, match="refuses"):
        load(folder)


def test_an_unlisted_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jinja"
    secret.write_text("SECRET")
    (folder / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(TokenizerError, match="has no chat template"):
        load(folder).apply_chat_template([{"role": "user", "content": "x"}])


def test_only_files_of_the_folder_are_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    original = io.open

    def watched(file: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            opened.append(Path(file).resolve())
        return original(file, *arguments, **options)

    by_number = os.open

    def watched_by_number(*arguments: Any, **options: Any) -> int:
        handle = by_number(*arguments, **options)
        opened.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        return handle

    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(io, "open", watched)
    monkeypatch.setattr(os, "open", watched_by_number)
    load(folder).generate("a", max_new_tokens=2)
    assert folder.resolve() / "tokenizer.json" in opened
    assert all(folder.resolve() in (path, path.parent) for path in opened), opened


def test_loading_needs_no_network_and_no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("socket.socket", None)
    assert load(folder).generate("a", max_new_tokens=2).token_ids


def add_a_layer(manifest: dict[str, Any]) -> None:
    third = {"layer": 2, "past": "past_key_values.2.key", "present": "present.2"}
    manifest["decoder"]["states"].append({**manifest["decoder"]["states"][0], **third})
    manifest["decoder"]["num_layers"] = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m["inputs"].pop(0),
            r"input 'input_ids' is tensor\(int64\) in model.onnx, but absent in the manifest",
        ),
        (
            lambda m: m["decoder"].update(kv_form="paged"),
            "'paged', but this topw_deploy supports concat, static, shared",
        ),
        (add_a_layer, r"no past_key_values.2.key, but its cache has the form concat"),
        (lambda m: m["files"].pop("tokenizer.json"), r"has no tokenizer.json; export the model again"),
    ],
)
def test_the_manifest_must_belong_to_the_graph_and_the_files(
    folder: Path, change: Callable[[Any], Any], message: str
) -> None:
    edit_json(folder / MANIFEST_NAME, change)
    with pytest.raises(TokenizerError if "tokenizer" in message else ManifestError, match=message):
        load(folder)


@pytest.mark.parametrize("share", [40, pytest.param(7, marks=pytest.mark.long)], ids=["few", "many"])
def test_a_manifest_with_any_value_in_a_field_generates_or_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """The graph stays the same. tests/test_manifest.py only reads the manifests."""
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    monkeypatch.setattr(graph_session, "_new_session", lambda *_: session)
    generated = refused = 0
    for _, text in islice(mutations(json.loads((folder / MANIFEST_NAME).read_text())), 0, None, share):
        (folder / MANIFEST_NAME).write_text(text, "utf-8")
        try:
            with load(folder, sampler="graph") as model:
                model.generate(["abcdef", "x"], max_new_tokens=20, seed=1)
            generated += 1
        except TopWError:
            refused += 1
    assert min(generated, refused) > 400 // share, (generated, refused)


def test_a_graph_without_the_sampler_is_refused(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    kept = [output for output in model.graph.output if output.name != "certified"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    put(folder, "model.onnx", model.SerializeToString())
    outputs = [o for o in json.loads((folder / MANIFEST_NAME).read_text())["outputs"] if o["name"] != "certified"]
    edit_json(folder / MANIFEST_NAME, outputs=outputs)
    with pytest.raises(ManifestError, match="has no 'certified', so its sampler is not Top-W's"):
        load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"a": 1}', "[" * 1_000_000, '{"a": 1' + "0" * 1_000_000 + "}", "\ud800"],
    ids=["cut", "list", "other", "deep", "long", "bytes"],
)
def test_spoilt_side_files_raise_typed_errors_or_nothing(folder: Path, name: str, content: str) -> None:
    put(folder, name, content.encode("utf-8", "surrogatepass"))
    if content == '{"a": 1}' and name != "tokenizer.json":
        assert load(folder).generate("a", max_new_tokens=1).token_ids
    else:
        with pytest.raises(TopWError, match=re.escape(name)):
            load(folder)


def test_settings_for_training_batches_do_not_cut_a_prompt(toy: Toy, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=10)
    model = load(export(tmp_path / "cut", toy, tokenizer=tokenizer))
    assert model.generate("hello", max_new_tokens=1).prompt_tokens == 5


def test_a_folder_of_the_other_kind_is_refused_with_the_class_that_opens_it(toy_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="holds a whole model; give another folder, or open it with TopWModel"):
        TopWSampler.from_pretrained(toy_folder)
    with pytest.raises(ManifestError, match=r"holds a sampler without a decoder; .* TopWSampler"):
        TopWModel.from_pretrained(export_sampler(tmp_path / "sampler", Toy.random(0)))
