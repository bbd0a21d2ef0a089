"""Archives below a limit, and pack.json."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import archives, pack
from benchmarks.gpu.archives import INDEX, components, unpack
from benchmarks.gpu.pack import Host, Packed
from topw_deploy.errors import BenchmarkError
from topw_deploy.runtime import TopWModel

from .packed_demo import packed_demo  # noqa: F401  # a fixture

pytestmark = pytest.mark.long

HOST = Host(90, "3.12")
LIMIT = 200_000


def write_tree(root: Path) -> dict[str, bytes]:
    """Texts, a file above LIMIT, and a library with a link; returns contents by name."""
    noise = random.Random(5)
    files = {f"part/small-{i}.txt": f"text {i}\n".encode() * 50 for i in range(30)}
    files["part/large.bin"] = noise.randbytes(700_000)
    files["part/lib/libcode.so.1.2"] = noise.randbytes(90_000) + bytes(900_000)
    files["part/lib/empty.py"] = b""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "part/lib/libcode.so").symlink_to("libcode.so.1.2")
    return files


def tar_names(path: Path) -> list[str]:
    return subprocess.run(["tar", "-tJf", path], check=True, capture_output=True, text=True).stdout.splitlines()


def test_only_a_file_above_the_limit_is_sliced(tmp_path: Path) -> None:
    files = write_tree(tmp_path / "tree")
    written = archives.write(tmp_path / "tree", tmp_path, "pack-part", LIMIT)
    assert list(written.slices) == ["part/large.bin"]
    whole = written.slices["part/large.bin"]
    assert whole["sha256"] == hashlib.sha256(files["part/large.bin"]).hexdigest()
    assert len(whole["slices"]) == 4
    names = [name for archive in written.archives for name in tar_names(tmp_path / archive["name"])]
    expected = [*whole["slices"], *(name for name in files if name != "part/large.bin"), "part/lib/libcode.so"]
    assert sorted(names) == sorted(expected)


def test_the_same_files_give_the_same_archives(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree")
    first = archives.write(tmp_path / "tree", tmp_path, "first", LIMIT)
    for path in (tmp_path / "tree").rglob("*.txt"):
        path.touch()
    second = archives.write(tmp_path / "tree", tmp_path, "second", LIMIT)
    assert [a["sha256"] for a in first.archives] == [a["sha256"] for a in second.archives]


def stage_tree(tree: Path, scratch: Path, host: Host) -> Packed:
    write_tree(tree.parent)
    (tree.parent / "part").rename(tree)
    return Packed("1.0", python_path=(".",), linker_path=("lib",))


def refuse(tree: Path, scratch: Path, host: Host) -> Packed:
    raise BenchmarkError(f"libthing.so has code for sm_120, none for sm_{host.sm}.")


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """One component has the files above, one cannot be packed."""
    monkeypatch.setattr(pack, "_PACKAGES", {"onnxruntime": stage_tree, "tensorrt": refuse})


@pytest.mark.usefixtures("staged")
def test_the_index_lists_packed_and_absent_components(tmp_path: Path) -> None:
    assert pack.pack(tmp_path, ["tensorrt", "onnxruntime"], LIMIT, HOST) == 1
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    assert index["absent"] == {"tensorrt": "libthing.so has code for sm_120, none for sm_90."}
    entry = index["components"]["onnxruntime"]
    assert entry["archives"] == [archive["name"] for archive in index["archives"]]
    assert entry["python_path"] == ["onnxruntime"]
    assert entry["linker_path"] == ["onnxruntime/lib"]
    assert (entry["files"], entry["bytes"]) == (33, 1_690_000 + sum(50 * len(f"text {i}\n") for i in range(30)))
    assert {path.name for path in tmp_path.iterdir()} == {INDEX, *entry["archives"]}


def test_a_folder_with_other_files_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("chapter 1", encoding="utf-8")
    with pytest.raises(BenchmarkError, match=r"thesis\.txt, which this command did not write"):
        pack.pack(tmp_path, ["folders"], LIMIT, HOST)
    assert (tmp_path / "thesis.txt").is_file()


def test_a_missing_package_is_reported_with_pips_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in words
        assert words[words.index("--python-version") + 1] == "3.12"
        return subprocess.CompletedProcess(words, 1, "", "ERROR: No matching distribution found for it==9")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(BenchmarkError, match=r"^pip does not fetch it==9 for Python 3\.12: ERROR: No matching"):
        pack.download_wheel("it==9", HOST, tmp_path)


def test_the_demo_is_packed_with_the_cpus_tokens(packed_demo: list[Path], tmp_path: Path) -> None:  # noqa: F811
    assert len(packed_demo) >= 4
    assert unpack(packed_demo, tmp_path / "host") == []
    assert list(components(tmp_path / "host")) == ["folders", "packages"]
    folder = tmp_path / "host" / "folders" / "float16-gqa"
    recorded = json.loads(folder.with_name("float16-gqa.tokens.json").read_text(encoding="utf-8"))
    assert len(recorded["tokens"]) == 32
    with TopWModel.from_pretrained(folder, provider="cpu") as model:
        assert model.generate(**recorded["requests"][0]).token_ids == recorded["tokens"][0]
