"""Measuring the median distance of likely pairs on an export's text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.toy_model import BOS, VOCAB, Toy, byte_tokenizer, export
from topw_deploy.export.verification import worker
from topw_deploy.export.verification.quantised import page_ends
from topw_deploy.export.verification.run import PairDistance, format_result, record_of
from topw_deploy.manifest import load_decoder_manifest
from topw_deploy.sampling import Geometry, TopWOptions, median_distance
from topw_deploy.sampling.geometry import SAMPLE_TEXT

TOY = Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))


class Bigrams:
    """A reference whose logits depend on the last token alone."""

    name = "bigrams"

    def logits(self, ids: np.ndarray) -> np.ndarray:
        return TOY.follow[ids].astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("toy") / "out", TOY, tokenizer=byte_tokenizer(bos=True))


def test_the_text_is_the_beginning_and_the_end_of_a_page_each_behind_bos(folder: Path) -> None:
    manifest = load_decoder_manifest(folder)
    first, last = page_ends(folder, manifest, 40)
    whole, again = page_ends(folder, manifest, 10**6)  # cut to the context
    assert (len(first), len(last), len(whole)) == (40, 40, manifest.decoder.context_length)
    assert first[0] == last[0] == BOS
    assert first.tolist() == whole[:40].tolist()
    assert last[1:].tolist() == again[-39:].tolist()
    assert first[1:].tolist() != last[1:].tolist()
    assert len(SAMPLE_TEXT) > 10 * 40


def test_a_folder_without_a_tokenizer_has_no_text_and_no_median(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", TOY)
    manifest = load_decoder_manifest(folder)
    del manifest.files["tokenizer.json"]
    assert page_ends(folder, manifest, 40) == []
    geometry = Geometry.from_embeddings(TOY.embeddings, "mahalanobis")
    assert list(worker._measure_pair_distance(folder, manifest, Bigrams(), geometry)) == []  # type: ignore[arg-type]


def test_the_median_is_of_the_references_logits_on_that_text_and_reaches_the_manifest(folder: Path) -> None:
    manifest = load_decoder_manifest(folder)
    geometry = Geometry.from_embeddings(TOY.embeddings, "mahalanobis")
    (found,) = worker._measure_pair_distance(folder, manifest, Bigrams(), geometry)  # type: ignore[arg-type]
    rows = [row for ids in page_ends(folder, manifest, 64) for row in Bigrams().logits(ids)]
    assert len(rows) == 128
    assert found.median == median_distance(geometry, rows)
    assert 0 < found.median < geometry.distances(np.arange(VOCAB), np.arange(VOCAB)).max()
    assert record_of([found]).median_distance == found.median
    assert format_result(PairDistance(21.3456)) == "  -[i] median distance of likely pairs: 21.35"
