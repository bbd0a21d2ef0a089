"""Finding a model."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from topw_deploy.errors import SourceError
from topw_deploy.export.source.resolve import resolve
from topw_deploy.manifest import MANIFEST_NAME
from topw_deploy.tiny import TINY_MODEL


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use neither the network nor the user's cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def hub_cache(cache: Path, *names: str) -> str:
    """The hub's cache layout; returns the commit."""
    commit = "a" * 40
    home = cache / "models--me--tiny"
    touch(home / "blobs", *(name.replace("/", "_") for name in names))
    touch(home / "refs", "main")
    (home / "refs" / "main").write_text(commit)
    for name in names:
        link = home / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(home / "blobs" / name.replace("/", "_"))
    return commit


def test_demo_is_the_bundled_model() -> None:
    source = resolve("tiny")
    assert source.folder == TINY_MODEL
    assert (source.route, source.revision) == ("trace", "bundled")


def test_a_folder_with_weights_is_traced(tmp_path: Path) -> None:
    source = resolve(str(touch(tmp_path, "config.json", "model.safetensors")))
    assert (source.route, source.folder) == ("trace", tmp_path)


@pytest.mark.parametrize(
    ("files", "named", "genai", "found"),
    [
        (["config.json", "model.onnx"], "", None, "model.onnx"),
        (["config.json", "anything.onnx"], "", None, "anything.onnx"),
        (["config.json", "onnx/model.onnx"], "", None, "onnx/model.onnx"),
        (["a.onnx", "b.onnx"], "b.onnx", None, "b.onnx"),
        (["a.onnx", "b.onnx"], "", "b.onnx", "b.onnx"),
        (["a.onnx", "../b.onnx"], "", "../b.onnx", "a.onnx"),  # outside the folder
    ],
)
def test_a_graph_is_imported(tmp_path: Path, files: list[str], named: str, genai: str | None, found: str) -> None:
    """The given file, the one that genai_config.json names in the folder, a usual one, or the only one."""
    folder = tmp_path / "model"
    folder.mkdir()
    touch(folder, *files)
    if genai is not None:
        (folder / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"filename": genai}}}))
    source = resolve(str(folder / named))
    assert (source.route, source.onnx, source.folder) == ("import", folder / found, folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["readme.json"], "neither Hugging Face weights"),
        (["a.onnx", "b.onnx"], "2 ONNX files.*give the path of the decoder's file"),
        (["model.safetensors"], "no config.json"),
        ([MANIFEST_NAME, "model.onnx"], "already an export"),
    ],
)
def test_a_folder_without_a_single_model_is_refused(tmp_path: Path, files: list[str], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        resolve(str(touch(tmp_path, *files)))


def test_a_file_other_than_a_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"not an \.onnx or \.gguf file"):
        resolve(str(touch(tmp_path, "weights.bin") / "weights.bin"))


PATHS = "./nowhere/model decoder.onnx models/decoder.onnx /tmp/nowhere ~/nowhere a/b/c /tmp/nowhere.gguf"


@pytest.mark.parametrize("name", PATHS.split())
def test_the_hub_is_not_asked_for_a_path(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(SourceError, match=f"^{re.escape(name)} does not exist, and is not a hub id"):
        resolve(name)


def test_an_inaccessible_path_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(SourceError, match="locked/model cannot be read: Permission denied; check its permissions"):
        resolve("locked/model")


def test_a_cached_hub_model_is_found_without_the_network(tmp_path: Path) -> None:
    commit = hub_cache(tmp_path, "config.json", "model.safetensors", "tokenizer.json")
    source = resolve("me/tiny", cache_dir=tmp_path, local_files_only=True)
    assert (source.revision, source.route) == (commit, "trace")


def test_a_graph_in_the_hubs_cache_is_found_through_its_links(tmp_path: Path) -> None:
    hub_cache(tmp_path, "config.json", "onnx/model.onnx", "onnx/model.onnx_data")
    source = resolve("me/tiny", cache_dir=tmp_path, local_files_only=True)
    assert source.onnx is not None
    assert source.onnx.is_symlink()
    assert source.folder.name == "a" * 40


def test_a_hub_model_without_weights_is_refused(tmp_path: Path) -> None:
    hub_cache(tmp_path, "config.json")
    with pytest.raises(SourceError, match="neither safetensors"):
        resolve("me/tiny", cache_dir=tmp_path, local_files_only=True)


@pytest.mark.parametrize("given", [{"local_files_only": True}, {}], ids=["asked", "HF_HUB_OFFLINE"])
def test_a_missing_hub_model_says_how_to_get_it(tmp_path: Path, given: dict[str, bool]) -> None:
    with pytest.raises(SourceError, match=r"nor complete in the hub's cache .*HF_HUB_OFFLINE unset"):
        resolve("me/missing", cache_dir=tmp_path, **given)


def answer(status: int) -> Any:
    """A minimal HTTP response for hub errors."""
    return SimpleNamespace(status_code=status, headers={}, request=SimpleNamespace(method="GET", url="https://hub"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("gated", response=answer(403)), r"gated; accept its licence.*HF_TOKEN"),
        (errors.RepositoryNotFoundError("no", response=answer(404)), "neither a local path nor a model on the hub"),
        (errors.RevisionNotFoundError("no", response=answer(404)), "has no revision 'v9'"),
        (PermissionError(errno.EACCES, "Permission denied"), r"hub's cache .*denied.*--cache-dir"),
        (OSError(errno.EROFS, "Read-only file system"), "cache .*Read-only file system"),
        (OSError(errno.ENOSPC, "No space left on device"), "cache .*No space left on device"),
        (ConnectionError("connection reset"), "could not be downloaded"),
    ],
)
def test_every_download_failure_has_its_message(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_arguments: object, **_options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(SourceError, match=message):
        resolve("me/tiny", revision="v9")


def test_the_hub_options_reach_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, object]] = []

    def download(_model: str, **options: object) -> str:
        asked.append(options)
        return str(touch(tmp_path / ("b" * 40), "config.json", "model.safetensors"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("me/tiny", revision="v1", cache_dir=tmp_path, token="secret")
    assert asked[0]["revision"] == "v1"
    assert asked[0]["token"] == "secret"
    assert asked[0]["cache_dir"] == tmp_path
    assert not any(pattern.endswith(".py") for pattern in asked[0]["allow_patterns"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("adapter", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("weights", [[], ["model.safetensors"]])
def test_an_adapter_is_refused_with_the_lines_that_merge_it(tmp_path: Path, adapter: str, weights: list[str]) -> None:
    folder = touch(tmp_path / "m", "config.json", adapter, *weights)
    with pytest.raises(SourceError, match=r"adapter.*AutoPeftModelForCausalLM.*merge_and_unload"):
        resolve(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "onnx/model.onnx_data"])
def test_a_link_to_a_pruned_blob_is_named(tmp_path: Path, name: str) -> None:
    others = [file for file in ("model.safetensors", "config.json") if file != name and "onnx" not in name]
    folder = touch(tmp_path / "m", *(others or ["config.json", "onnx/model.onnx"]))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../../blobs/0123")
    with pytest.raises(SourceError, match=rf"{name} is a link to .*0123, which does not exist.*download"):
        resolve(str(folder))
