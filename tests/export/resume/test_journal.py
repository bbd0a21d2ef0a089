"""Journals that another program wrote or damaged: the export starts over, and touches no file outside."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.special_files import no_hang
from tests.support.toy_model import Toy
from tests.support.toy_model import export as export_toy
from topw_deploy.export.request import export_request
from topw_deploy.export.resume.finished_stages import FinishedStages
from topw_deploy.export.resume.journal import DataLog, Journal
from topw_deploy.manifest import Verification, load_decoder_manifest


def write_journal(folder: Path, *lines: Any) -> Journal:
    """A journal with these lines; text as it is, and others as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "journal.jsonl").write_text("\n".join(texts) + "\n")
    with no_hang():
        return Journal(folder)


def stage_line(name: str = "a", **note: Any) -> dict[str, Any]:
    return {"stage": name, "stamp": "s", "note": note}


BAD: dict[str, Any] = {
    "lists in lists": "[" * 1_000_000,
    "a text": '"a"',
    "no stage": {"stamp": "s", "note": {}},
    "a stage that is a list": {"stage": [1], "stamp": "s", "note": {}},
    "a note that is a number": {"stage": "a", "stamp": "s", "note": 5},
    "a name twice": '{"stage": "b", "stamp": "s", "note": {}, "stage": "b"}',
    "NaN": '{"stage": "b", "stamp": "s", "note": {"n": NaN}}',
    "a weight of no file": {"wrote": "x", "name": "w", "sha256": "0"},
    "a weight without a name": {"wrote": "model.onnx_data"},
    "a file above": stage_line("b", file="../secret", sha256="0" * 64),
    "an absolute file": stage_line("b", file="/etc/passwd", sha256="0" * 64),
    "a file on a drive": stage_line("b", file="C:\\secret", sha256="0" * 64),
    "a file without a hash": stage_line("b", file="x"),
    "a file that is a number": stage_line("b", file=5, sha256="0" * 64),
    "a made file above": stage_line("b", made={"../secret": "0" * 64}),
    "a made file without a hash": stage_line("b", made={"x": None}),
    "made files in a list": stage_line("b", made=["x"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_line_of_another_form_ends_the_journal(tmp_path: Path, name: str) -> None:
    journal = write_journal(tmp_path, stage_line(), BAD[name], stage_line("c"))
    assert journal.find("a", "s") == {}
    assert journal.find("b", "s") is None
    assert journal.find("c", "s") is None


@pytest.mark.parametrize("name", BAD)
def test_stages_recorded_after_a_damaged_line_are_found_by_the_next_attempt(tmp_path: Path, name: str) -> None:
    write_journal(tmp_path, stage_line(), BAD[name], stage_line("c")).record("d", "s")
    journal = Journal(tmp_path)
    assert [each for each in "abcd" if journal.find(each, "s") is not None] == ["a", "d"]


def test_a_stage_recorded_after_an_incomplete_line_is_found_by_the_next_attempt(tmp_path: Path) -> None:
    write_journal(tmp_path, stage_line(), stage_line("b"))
    path = tmp_path / "journal.jsonl"
    for cut in (1, 5):
        path.write_bytes(path.read_bytes()[:-cut])
        Journal(tmp_path).record("b", "s", cut=cut)
        assert Journal(tmp_path).find("a", "s") == {}
        assert Journal(tmp_path).find("b", "s") == {"cut": cut}


def test_a_journal_that_is_a_pipe_or_a_link_is_replaced(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "journal.jsonl", tmp_path / "elsewhere"
    elsewhere.write_text(content := json.dumps(stage_line()) + "\n")
    for make in (os.mkfifo, lambda journal: journal.symlink_to(elsewhere)):
        path.unlink(missing_ok=True)
        make(path)
        with no_hang():
            Journal(tmp_path).record("b", "s")
        assert Journal(tmp_path).find("b", "s") == {}
    assert elsewhere.read_text() == content


def test_a_journal_that_is_a_pipe_or_a_link_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "journal.jsonl")
    with no_hang():
        assert Journal(tmp_path).find("a", "s") is None
    (tmp_path / "journal.jsonl").unlink()
    (tmp_path / "elsewhere").write_text(json.dumps(stage_line()))
    (tmp_path / "journal.jsonl").symlink_to(tmp_path / "elsewhere")
    assert Journal(tmp_path).find("a", "s") is None


def test_a_stage_without_the_fields_it_needs_starts_over(tmp_path: Path) -> None:
    said: list[str] = []
    journal = write_journal(tmp_path, stage_line(found="none"))
    journal.say = said.append
    assert journal.find("a", "s", found=list) is None
    assert journal.find("a", "s", found=str) == {"found": "none"}
    assert said == [
        "Starting over: a (its line in the journal is damaged)",
        "Kept from the interrupted export: a",
    ]


def npy_bytes(array: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def npy_header(text: str) -> bytes:
    padded = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + bytes(24)


ARRAYS: dict[str, bytes] = {
    "nothing": b"",
    "a header that Python's tokenizer refuses": npy_header("{'descr': '<f8', ("),
    "2**60 numbers": npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846976,)}"),
    "2**61 numbers, whose bytes wrap to none": npy_header(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (2305843009213693952,)}"
    ),
    "a negative size": npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}"),
    "a pickle": npy_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"),
    "an archive": b"PK\x05\x06" + bytes(18),
}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", ARRAYS)
def test_a_kept_file_that_is_no_array_is_computed_again(tmp_path: Path, name: str) -> None:
    content = ARRAYS[name]
    (tmp_path / "a.npy").write_bytes(content)
    journal = write_journal(tmp_path, stage_line(file="a.npy", sha256=hashlib.sha256(content).hexdigest()))
    with no_hang():
        assert journal.array_once("a", "s", lambda: np.arange(3)).tolist() == [0, 1, 2]
    assert Journal(tmp_path).array_once("a", "s", lambda: np.zeros(1)).tolist() == [0, 1, 2]


def test_a_kept_file_behind_a_link_is_not_used(tmp_path: Path) -> None:
    content = npy_bytes(np.zeros(2))
    (tmp_path / "elsewhere.npy").write_bytes(content)
    (tmp_path / "a.npy").symlink_to("elsewhere.npy")
    journal = write_journal(tmp_path, stage_line(file="a.npy", sha256=hashlib.sha256(content).hexdigest()))
    assert journal.find("a", "s", file=str) is None


def test_a_verification_of_another_form_is_done_again(tmp_path: Path) -> None:
    manifest = load_decoder_manifest(export_toy(tmp_path / "toy", Toy.random(2)))
    request = export_request(model="demo", output=tmp_path / "out")
    expected = (Verification(status="skipped"), True)
    FinishedStages(Journal(tmp_path), request).verify_once(manifest, lambda: expected)
    (line,) = (tmp_path / "journal.jsonl").read_text().splitlines()
    for wrong in ({"verification": {"status": "certainly"}, "may_pad": True}, {"verification": {}, "may_pad": False},
                  {"verification": "passed", "may_pad": True}, {"verification": {}}):  # fmt: skip
        journal = write_journal(tmp_path, {**json.loads(line), "note": wrong})
        assert FinishedStages(journal, request).verify_once(manifest, lambda: expected) == expected


def finished_tokenizer(journal: Path | None, source: Path, output: Path, write: Callable[[], list[str]]) -> list[str]:
    stages = FinishedStages(Journal(journal), export_request(model="demo", output=output))
    return stages.write_tokenizer_once(source, output, write)


def test_a_changed_tiktoken_file_is_converted_again(tmp_path: Path) -> None:
    source, output, calls = tmp_path / "in", tmp_path / "out", list[str]()
    source.mkdir()
    output.mkdir()

    def write() -> list[str]:
        calls.append((source / "qwen.tiktoken").read_text())
        return []

    for content in ("a", "a", "b"):
        (source / "qwen.tiktoken").write_text(content)
        finished_tokenizer(tmp_path, source, output, write)
    assert calls == ["a", "b"]


def test_weights_are_listed_as_texts(tmp_path: Path) -> None:
    log = DataLog(Journal(tmp_path), "s")
    log.record_start("data", "layout", [])
    layout = json.loads((tmp_path / "journal.jsonl").read_text())["layout"]
    journal = write_journal(tmp_path, {"began": "data", "layout": layout}, {"wrote": "data", "name": 5, "sha256": None})
    assert DataLog(journal, "s").written_weights("data", "layout") == [("5", "None")]
