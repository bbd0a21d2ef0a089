"""The corpus is deterministic, and its training and held-out parts are separate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.corpus import (
    LONG_PARAGRAPH,
    Corpus,
    core_docstrings,
    is_held_out_candidate,
    library_docstrings,
    long_paragraphs,
    split_documents,
)
from topw_deploy.tiny.corpus import topic_sections

pytestmark = pytest.mark.slow


def test_another_process_gathers_the_same_text() -> None:
    # Another hash seed would expose set ordering.
    script = "from benchmarks.corpus import *\nprint(split_documents([*topic_sections(), *core_docstrings()]).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == split_documents([*topic_sections(), *core_docstrings()]).digest


def test_no_long_paragraph_is_on_both_sides_of_the_split(corpus: Corpus) -> None:
    train = {paragraph for document in corpus.train for paragraph in long_paragraphs(document)}
    held_out = {paragraph for document in corpus.held_out for paragraph in long_paragraphs(document)}
    assert held_out
    assert not train & held_out


def test_the_library_is_read_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text('"""A module that must stay unimported while its docstring is read."""\n1 / 0\n')
    assert list(library_docstrings(tmp_path)) == [
        "loud\n====\n\nA module that must stay unimported while its docstring is read."
    ]
    assert "loud" not in sys.modules


def test_a_document_that_shares_an_indented_paragraph_is_not_held_out() -> None:
    paragraph = "word " * (LONG_PARAGRAPH // 4)
    chosen = [f"{paragraph}\n\nNumber {i}" for i in range(100)]
    chosen = [document for document in chosen if is_held_out_candidate(document)][:1]
    copy = "Elsewhere\n\n    " + paragraph.replace("word word", "word\n    word")
    assert len(chosen) == 1
    assert split_documents(chosen).held_out == tuple(chosen)
    assert split_documents([*chosen, copy]) == Corpus(train=(*chosen, copy), held_out=())
