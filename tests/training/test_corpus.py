"""The corpus is deterministic, and its training and held-out parts are separate."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from topw_deploy.tiny.corpus import (
    LONG_PARAGRAPH,
    SHORTEST_DOCUMENT,
    Corpus,
    core_docstrings,
    is_held_out_candidate,
    library_docstrings,
    long_paragraphs,
    split_documents,
    split_sections,
    topic_sections,
)

pytestmark = pytest.mark.slow


def test_another_process_gathers_the_same_text() -> None:
    # Another hash seed would expose set ordering.
    script = (
        "from topw_deploy.tiny.corpus import *\nprint(split_documents([*topic_sections(), *core_docstrings()]).digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == split_documents([*topic_sections(), *core_docstrings()]).digest


def test_the_digest_depends_on_every_document(corpus: Corpus) -> None:
    shorter = Corpus(corpus.train[:-1], corpus.held_out)
    swapped = Corpus((corpus.train[1], corpus.train[0], *corpus.train[2:]), corpus.held_out)
    assert len({corpus.digest, shorter.digest, swapped.digest}) == 3


def test_no_long_paragraph_is_on_both_sides_of_the_split(corpus: Corpus) -> None:
    train = {paragraph for document in corpus.train for paragraph in long_paragraphs(document)}
    held_out = {paragraph for document in corpus.held_out for paragraph in long_paragraphs(document)}
    assert held_out
    assert not train & held_out


def test_documents_are_held_out_by_their_hash(corpus: Corpus) -> None:
    assert all(map(is_held_out_candidate, corpus.held_out))
    # 5 in 100 by hash: a binomial share, deviation below 0.4 points at 3,700 documents.
    share = len(corpus.held_out) / (len(corpus.held_out) + len(corpus.train))
    assert 0.03 < share < 0.065


def test_the_corpus_has_the_manual_the_core_and_the_library(corpus: Corpus) -> None:
    text = "\n".join((*corpus.train, *corpus.held_out))
    assert len(text) > 1_500_000
    assert "Assert statements are a convenient way to insert debugging assertions" in text
    assert "def isinstance(obj, class_or_tuple, /):" in text
    assert "class JSONDecoder(object):" in text


def test_documents_have_no_control_characters_or_empty_lines_around_them(corpus: Corpus) -> None:
    for document in (*corpus.train, *corpus.held_out):
        assert not any(ord(c) < 32 and c != "\n" for c in document)
        assert "\n\n\n" not in document
        assert document == document.strip("\n")


def test_the_library_is_read_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text('"""A module that must stay unimported while its docstring is read."""\n1 / 0\n')
    assert list(library_docstrings(tmp_path)) == [
        "loud\n====\n\nA module that must stay unimported while its docstring is read."
    ]
    assert "loud" not in sys.modules


def test_a_class_becomes_one_document_with_its_documented_members(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text(
        textwrap.dedent('''
        class Circle(Shape):
            """Round."""

            def area(self, unit: str = "m") -> float:
                """Return the area.

                In square units.
                """
                return 0.0

            def undocumented(self): ...

        async def fetch(url, *, timeout=None):
            """Fetch."""

        def silent(): ...
        ''')
    )
    assert [document for document in library_docstrings(tmp_path) if document] == [
        textwrap.dedent('''\
        class Circle(Shape):
            """Round."""

            def area(self, unit: str='m') -> float:
                """Return the area.

                In square units.
                """'''),
        textwrap.dedent('''\
        async def fetch(url, *, timeout=None):
            """Fetch."""'''),
    ]


def test_test_suites_and_broken_files_are_left_out(tmp_path: Path) -> None:
    for name in ("pkg/test/test_it.py", "pkg/__init__.py", "broken.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('"""Documented."""\n' + ("def (" if name == "broken.py" else ""))
    assert list(library_docstrings(tmp_path)) == ["pkg\n===\n\nDocumented."]


def test_signatures_of_core_functions_omit_the_marker_of_bound_arguments() -> None:
    openings = [line for document in core_docstrings() for line in document.split("\n")[:1]]
    assert openings
    assert not any("$" in line for line in openings)
    assert {"def globals():", "def isinstance(obj, class_or_tuple, /):"} <= set(openings)


def test_sections_are_cut_at_headings_of_every_depth() -> None:
    text = "Preamble.\n\nTop\n***\n\nFirst.\n\nDeeper\n------\n\nSecond.\n\nEmpty\n=====\n"
    assert list(split_sections(text)) == ["Preamble.", "Top\n===\n\nFirst.", "Deeper\n======\n\nSecond.", ""]


def test_a_document_that_shares_an_indented_paragraph_is_not_held_out() -> None:
    paragraph = "word " * (LONG_PARAGRAPH // 4)
    chosen = [f"{paragraph}\n\nNumber {i}" for i in range(100)]
    chosen = [document for document in chosen if is_held_out_candidate(document)][:1]
    copy = "Elsewhere\n\n    " + paragraph.replace("word word", "word\n    word")
    assert len(chosen) == 1
    assert split_documents(chosen).held_out == tuple(chosen)
    assert split_documents([*chosen, copy]) == Corpus(train=(*chosen, copy), held_out=())


def test_exact_copies_and_stubs_are_dropped() -> None:
    document = "text " * SHORTEST_DOCUMENT
    corpus = split_documents([document, "too short", document])
    assert [*corpus.train, *corpus.held_out] == [document]
