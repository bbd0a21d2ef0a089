"""A pipe, socket, device, link or folder instead of a file: ManifestError without waiting."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.samples import slow
from tests.support.special_files import OTHERS, SPECIAL, no_hang
from topw_deploy.cli.build_engine import command as build_engine
from topw_deploy.cli.check import command as check
from topw_deploy.cli.inspect import command as inspect
from topw_deploy.cli.verify import command as verify
from topw_deploy.errors import ManifestError, TensorRTError, TopWError
from topw_deploy.manifest import MANIFEST_NAME, DecoderManifest, check_hashes, load_manifest
from topw_deploy.runtime import TopWModel, TopWSampler
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.tensorrt.stamp import read_stamp, stamp_paths

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
EVERY = {**SPECIAL, **OTHERS}
QUICK = [kind if kind in ("a named pipe", "a link to a file inside") else slow(kind) for kind in EVERY]
READ = (
    "tokenizer.json", "config.json", "generation_config.json", "chat_template.jinja", "tokenizer_config.json",
    "special_tokens_map.json", "model.onnx_data",
)  # fmt: skip


@pytest.fixture
def folder(toy_folder: Path, tmp_path: Path) -> Path:
    """A copy to modify."""
    return Path(shutil.copytree(toy_folder, tmp_path / "copy"))


def put(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    EVERY[kind](path)


def vouch(folder: Path, name: str, size: int) -> None:
    """Make the manifest list `name` with this size."""
    path = folder / MANIFEST_NAME
    data = json.loads(path.read_text())
    data["files"][name] = {"sha256": "0" * 64, "size": size}
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("kind", EVERY)
def test_the_manifest_is_a_regular_file(folder: Path, kind: str) -> None:
    put(kind, folder / MANIFEST_NAME)
    for opens in (TopWModel.from_pretrained, TopWSampler.from_pretrained, load_manifest):
        with no_hang(), pytest.raises(ManifestError, match=r"topw_manifest.json is a .*, not a regular file"):
            opens(folder)


def test_a_link_to_the_manifest_itself_is_refused_and_one_to_the_folder_is_not(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert TopWModel.from_pretrained(link, provider="cpu").generate("a", max_new_tokens=1).token_ids
    (folder / MANIFEST_NAME).rename(tmp_path / "elsewhere.json")
    (folder / MANIFEST_NAME).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ManifestError, match="is a symbolic link, not a regular file; copy the file itself there"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("name", [*READ, "model.onnx"])
def test_a_listed_file_is_a_regular_file(folder: Path, name: str, kind: str) -> None:
    put(kind, folder / name)
    size = (folder / name).stat().st_size if kind.startswith(("a folder", "a link to a file")) else 0
    vouch(folder, name, size)
    with no_hang(), pytest.raises(ManifestError, match=rf"{name} (in .* is a|is reached through a symbolic link)"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["chat_template.jinja", "model.onnx_data", "sub/weights"])
def test_a_special_file_that_is_not_listed_is_named_too(folder: Path, name: str, kind: str) -> None:
    (folder / "sub").mkdir()
    put(kind, folder / name)
    with no_hang(), pytest.raises(ManifestError, match=rf"{name} is a .*a model folder holds regular files only"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize("kind", OTHERS)
def test_a_link_or_folder_that_is_not_listed_is_not_read(folder: Path, kind: str) -> None:
    put(kind, folder / "chat_template.jinja")
    with no_hang():
        assert TopWModel.from_pretrained(folder, provider="cpu").generate("a", max_new_tokens=1).token_ids


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("name", [MANIFEST_NAME, "tokenizer.json", "model.onnx"])
@pytest.mark.parametrize(
    ("command", "options"),
    [(inspect, []), (inspect, ["--json"]), (verify, []), (verify, ["--hashes-only"]), (check, []), (build_engine, [])],
    ids=["inspect", "inspect --json", "verify", "verify --hashes-only", "check", "build-engine"],
)
def test_commands_refuse_a_file_that_is_not_regular(
    folder: Path, name: str, kind: str, command: object, options: list[str]
) -> None:
    put(kind, folder / name)
    if name != MANIFEST_NAME:
        vouch(folder, name, 0)
    with no_hang():
        outcome = CliRunner().invoke(command, [str(folder), *options])  # type: ignore[arg-type]
    said = outcome.output if isinstance(outcome.exception, SystemExit) else str(outcome.exception)
    assert outcome.exit_code
    assert isinstance(outcome.exception, (ManifestError, SystemExit)), repr(outcome.exception)
    assert name in said


@pytest.mark.parametrize("kind", EVERY)
def test_a_file_that_is_swapped_after_the_manifest_was_read_is_not_waited_for(folder: Path, kind: str) -> None:
    opened = ModelFolder(folder, DecoderManifest)
    for name in ("tokenizer.json", "model.onnx"):
        put(kind, folder / name)
    with no_hang(), pytest.raises(ManifestError):
        opened.read_text("tokenizer.json")
    with no_hang(), pytest.raises(ManifestError):
        check_hashes(folder, opened.manifest)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_engines_and_stamps_are_regular_files(folder: Path, kind: str) -> None:
    (folder / "engines").mkdir()
    put(kind, folder / "engines" / "gpu.json")
    put(kind, folder / "engines" / "gpu.engine")
    (stamp,) = [path for path in stamp_paths(folder) if path.stem == "gpu"]
    with no_hang(), pytest.raises(TensorRTError, match="it is not a file in the folder"):
        read_stamp(stamp)
    with no_hang():
        outcome = CliRunner().invoke(inspect, [str(folder)])
    assert "it is not a file in the folder" in outcome.output
    with no_hang():
        assert TopWModel.from_pretrained(folder, provider="cpu").generate("a", max_new_tokens=1).token_ids


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a link outside"])
def test_a_file_or_link_in_place_of_the_folder_of_engines_is_not_used(folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "a link outside":
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "gpu.json").write_text("{}")
        (folder / "engines").symlink_to(tmp_path / "outside")
    else:
        put(kind, folder / "engines")
    with no_hang():
        assert stamp_paths(folder) == []
        outcome = CliRunner().invoke(inspect, [str(folder)])
    said = outcome.output + str(outcome.exception)
    assert "is a symbolic link, but engines must be in the folder itself" in said or "engines is a" in said


def test_a_model_without_permission_to_read_is_a_typed_error(folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (folder / "tokenizer.json").chmod(0)
    with pytest.raises(TopWError, match=r"tokenizer.json cannot be read: Permission denied"):
        TopWModel.from_pretrained(folder, provider="cpu")
