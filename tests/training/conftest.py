"""A corpus that all tests share, because gathering takes seconds."""

from __future__ import annotations

import pytest

from benchmarks.corpus import Corpus, gather_corpus


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return gather_corpus()
