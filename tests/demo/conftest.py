"""Gathers the corpus, which takes seconds, once."""

from __future__ import annotations

import pytest

from topw_deploy.demo.corpus import Corpus, gather_corpus


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return gather_corpus()
