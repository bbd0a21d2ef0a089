"""`geom_unit="median"`: the processor, the sampler alone and the definition agree."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.toy_model import BOS, byte_tokenizer
from topw_deploy.errors import ParameterError
from topw_deploy.export.sampler_only import export_sampler
from topw_deploy.runtime import TopWSampler
from topw_deploy.sampling import Geometry, median_distance
from topw_deploy.sampling.geometry import SAMPLE_TEXT
from topw_deploy.sampling.processor import TopWLogitsProcessor, median_distance_of

from .tiny import VOCAB

METRIC = "mahalanobis"
SCALE = {"lam": 0.3, "beta": 1.0, "init_top_p": 0.5, "geom_scale": 0.3}
SCORES = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(bos=True))


@pytest.fixture(scope="module")
def logits(model):
    """The model's logits at the steps of both texts, float32 [128, VOCAB]."""
    ids = byte_tokenizer().encode(SAMPLE_TEXT).ids
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([[BOS, *part]])).logits[0] for part in (ids[:63], ids[-63:])]
    return torch.cat(rows).numpy()


@pytest.mark.parametrize("metric", [METRIC, "cosine"])
def test_the_processors_measurement_is_the_definitions(model, tokenizer, logits, metric):
    geometry = Geometry.from_embeddings(model.get_input_embeddings().weight.detach().numpy(), metric)
    assert median_distance_of(model, tokenizer, metric) == pytest.approx(median_distance(geometry, logits), rel=1e-9)
    assert median_distance_of(model, tokenizer, "uniform") == 1.0


@pytest.mark.slow
def test_the_processor_and_the_sampler_alone_keep_the_same_tokens(model, tokenizer, logits, tmp_path: Path):
    table = model.get_input_embeddings().weight.detach().numpy()
    np.save(tmp_path / "table.npy", table)
    np.save(tmp_path / "logits.npy", logits)
    export_sampler(
        None,
        tmp_path / "out",
        embeddings=tmp_path / "table.npy",
        logits=tmp_path / "logits.npy",
        top_m=100,
        with_keep_mask=True,
    )
    sampler = TopWSampler.from_pretrained(tmp_path / "out", provider="cpu")
    median = median_distance_of(model, tokenizer)
    assert sampler.manifest.median_distance == pytest.approx(median, rel=1e-9)
    topw = TopWLogitsProcessor(model, top_m=100, geom_unit="median", median_distance=median, **SCALE)
    assert topw.parameters.geom_scale == np.float32(SCALE["geom_scale"] / median)
    kept = topw(torch.ones(12, 1, dtype=torch.int64), SCORES).isfinite().numpy()
    alone = sampler.sample(SCORES.numpy(), uniform=0.5, geom_unit="median", **SCALE)
    assert np.array_equal(alone.keep_mask, kept)
    assert not np.array_equal(sampler.sample(SCORES.numpy(), uniform=0.5, **SCALE).keep_mask, kept)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"geom_unit": "median", "geom_scale": 1.0}, r"no median_distance; measure it with .*median_distance_of"),
        ({"geom_unit": "median", "median_distance": 2.0}, "geom_scale is not given with it"),
        ({"geom_unit": "mean"}, "geom_unit is 'mean', but must be one of raw, median"),
        ({"geom_unit": "median", "median_distance": 0.0, "geom_scale": 1.0}, "median_distance is 0.0, but must be"),
        ({"geom_unit": "median", "median_distance": 2.0, "geom_scale": "1"}, "geom_scale is '1', but must be a finite"),
    ],
)
def test_a_unit_that_cannot_be_used_is_refused(model, given, message):
    with pytest.raises(ParameterError, match=message):
        TopWLogitsProcessor(model, **given)
