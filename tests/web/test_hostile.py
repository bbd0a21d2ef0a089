"""Folders that the JavaScript library must refuse, over HTTP and, by examples/node, on the disk.

The cases are those of tests/attacks, as far as they concern what JavaScript reads.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.attacks import MEMORY, OTHERS, SPECIAL, claim, put, sparse
from tests.support.browser import run_node
from tests.support.toy_model import Toy, export
from tests.test_manifest import BOMBS, OUTSIDE
from topw_deploy.manifest import MANIFEST_NAME

pytestmark = pytest.mark.slow

KINDS = {**SPECIAL, **OTHERS}
SCRIPT = Path(__file__).with_name("hostile.mjs")
Change = Callable[[Path], object]
Case = tuple[Change, str]  # (what to do to a folder, the message's pattern)


def manifest(content: bytes) -> Change:
    return lambda folder: (folder / MANIFEST_NAME).write_bytes(content)


def huge(name: str, size: int) -> Change:
    def change(folder: Path) -> None:
        sparse(folder / name, size)
        if name != MANIFEST_NAME:
            claim(folder, name, size)

    return change


def instead(name: str, kind: str) -> Change:
    """Put something that is not a regular file in a file's place. The manifest has the size that a link leads to."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        KINDS[kind](folder / name)
        if name != MANIFEST_NAME:
            claim(folder, name, 2 if kind.startswith("a link to a file") else 0)

    return change


def linked_folder(folder: Path) -> None:
    """A folder of the listed path is a link."""
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    (outside / "data").write_bytes(b"{}")
    (folder / "sub").symlink_to(outside)
    claim(folder, "sub/data", 2)


REFUSED: dict[str, Case] = {
    **{name: (manifest(content), "is not JSON|is not UTF-8|has format version") for name, content in BOMBS.items()},
    "a manifest of a terabyte": (huge(MANIFEST_NAME, 1 << 40), "is larger than 16777216 bytes"),
    "a byte order mark": (manifest(b"\xef\xbb\xbf{}"), "is not JSON"),
    "a list": (manifest(b"[]"), "has format version undefined"),
    "null": (manifest(b"null"), "has format version undefined"),
    **{
        f"the name {name!r}": (lambda folder, name=name: claim(folder, name, 1), "not a plain path inside the folder")
        for name in OUTSIDE
    },
    **{
        f"{kind} {name}": (lambda folder, name=name, content=content: put(folder, name, content), reason)
        for name in ("generation_config.json", "config.json", "tokenizer_config.json", "tokenizer.json")
        for kind, content, reason in (
            ("deep", b"[" * 1_000_000, f"{name} is not JSON"),
            ("not UTF-8:", b"\xed\xa0\x80", f"{name} is not UTF-8"),
            ("a list in", b"[1]", rf"{name} holds \[1\], not an object"),
        )
    },
    "a tokenizer of a terabyte": (huge("tokenizer.json", 1 << 40), "may have at most 268435456"),
    "a configuration of a gigabyte": (huge("config.json", 1 << 30), "may have at most 16777216"),
}
"""Over HTTP and on the disk."""

ON_DISK: dict[str, Case] = {
    "a model that is cut short": (
        lambda folder: (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes()[:-1]),
        "model.onnx has .* bytes, the manifest says",
    ),
    "no file": (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer.json cannot be read \(ENOENT\)"),
    "no manifest": (lambda folder: (folder / MANIFEST_NAME).unlink(), "it is not a finished export"),
    "a linked folder": (linked_folder, "sub/data in .* is reached through a symbolic link"),
    **{
        f"{kind} in place of {name}": (instead(name, kind), rf"{name} in .* is (a |reached through a symbolic link)")
        for name in (MANIFEST_NAME, "tokenizer.json", "model.onnx")
        for kind in KINDS
    },
    **{
        f"{kind}, not listed": (
            lambda folder, make=make: (folder / "sub").mkdir() or make(folder / "sub" / "weights"),  # type: ignore[func-returns-value]
            "weights is .*, and a model folder holds regular files only",
        )
        for kind, make in SPECIAL.items()
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What opening each folder gave, by (way, name): all in one process. The last ones are intact."""
    place = tmp_path_factory.mktemp("hostile")
    whole = export(place / "whole", Toy.random(2), form="grouped", rules=("top_w",))
    cases = {("disk", name): change for name, (change, _) in {**REFUSED, **ON_DISK}.items()}
    cases |= {("http", name): change for name, (change, _) in REFUSED.items()}
    cases |= {("disk", "intact"): lambda _: None, ("http", "intact"): lambda _: None}
    listed = []
    for number, ((over, _), change) in enumerate(cases.items()):
        folder = Path(shutil.copytree(whole, place / "all" / str(number)))
        change(folder)
        listed.append({"folder": str(folder), "over": over})
    (place / "list.json").write_text(json.dumps(listed))
    seen = run_node(SCRIPT, str(place / "list.json"))
    return {"memory": seen["memory"], **dict(zip(cases, seen["found"], strict=True))}


@pytest.mark.parametrize("over", ["disk", "http"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_folder_is_refused(answers: dict[Any, Any], name: str, over: str) -> None:
    answer = answers[over, name]
    assert answer["error"] == "ManifestError", answer
    assert re.search(REFUSED[name][1], answer["message"]), answer
    assert len(answer["message"]) < 1000


@pytest.mark.parametrize("name", ON_DISK)
def test_a_folder_on_the_disk_holds_regular_files_of_the_sizes_it_lists(answers: dict[Any, Any], name: str) -> None:
    answer = answers["disk", name]
    assert answer["error"] == "ManifestError", answer
    assert re.search(ON_DISK[name][1], answer["message"]), answer


def test_an_intact_folder_opens_and_refusals_take_little_memory(answers: dict[Any, Any]) -> None:
    assert answers["disk", "intact"] == {"tokens": 1}
    assert answers["http", "intact"] == {"tokens": 1}
    assert answers["memory"] < MEMORY
