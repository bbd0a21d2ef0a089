"""`TopWLogitsProcessor` keeps the reference's tokens; its measure of likely pairs is the definition's."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.support.toy_model import BOS, byte_tokenizer
from topw_deploy.errors import GenerationError, ParameterError
from topw_deploy.export.sampler_only import export_sampler
from topw_deploy.runtime import TopWSampler
from topw_deploy.sampling import (
    Geometry,
    TopWOptions,
    TopWParameters,
    as_float32,
    median_distance,
    preset_parameters,
)
from topw_deploy.sampling.geometry import SAMPLE_TEXT
from topw_deploy.sampling.processor import TopWLogitsProcessor, median_distance_of
from topw_deploy.sampling.torch import TensorGeometry

from .tiny import VOCAB, WIDE, kept_sets, model, reference_sets, table, tiny_llama

__all__ = ["model", "table"]

PROMPT = torch.tensor([[1, 5, 9, 30]])


def random_scores(rows, spread=2.0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * spread


@pytest.mark.parametrize("metric", ["mahalanobis", "unit", "cosine", "uniform"])
@pytest.mark.parametrize("potential", ["nearest", "knn"])
def test_it_keeps_what_the_definition_keeps(model, table, metric, potential):
    topw = TopWLogitsProcessor(model, metric=metric, potential=potential, **WIDE)
    scores = random_scores(20)
    assert kept_sets(topw(PROMPT, scores)) == reference_sets(topw, scores, table)
    assert topw.last.certified_share < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kept_scores_are_untouched_and_the_type_stays(model, dtype):
    scores = random_scores(6).to(dtype)
    before = scores.clone()
    masked = TopWLogitsProcessor(model, **WIDE)(PROMPT, scores)
    assert masked.dtype == dtype
    assert torch.equal(scores, before)
    assert torch.equal(torch.where(masked.isneginf(), before, masked), before)
    assert masked.isneginf().any(1).all()


def test_the_presets_and_names_are_the_packages(model):
    released = TopWLogitsProcessor(model, preset="released")
    assert released.parameters == as_float32(TopWParameters(geom_scale=0.6))
    assert released.options == TopWOptions(alt_iters=9, metric="cosine")
    width = model.get_input_embeddings().weight.shape[1]
    lively = TopWLogitsProcessor(model, preset="lively", beta=3.0, metric="unit")
    expected = preset_parameters("lively", "unit", width) | {"beta": 3.0}
    assert lively.parameters == as_float32(TopWParameters(**expected))
    assert lively.options == TopWOptions(metric="unit")
    assert (
        TopWLogitsProcessor(preset="lively", metric="uniform").parameters.init_top_p
        == as_float32({"init_top_p": 0.3}).init_top_p
    )
    creative = TopWLogitsProcessor(model, preset="creative", temperature=1.5)
    assert creative.parameters == as_float32(TopWParameters(beta=3.75, temperature=1.5))
    assert creative.options == TopWOptions()
    theirs = TopWLogitsProcessor(model, lambda_geom=0.5, warm_p=0.75, m=100)
    assert (theirs.parameters.lam, theirs.parameters.init_top_p, theirs.options.top_m) == (0.5, 0.75, 100)
    assert TopWLogitsProcessor(metric="uniform", lam=0.1).parameters.lam == as_float32({"lam": 0.1}).lam


def test_a_beta_that_depends_on_the_temperature_needs_generates_temperature(model):
    scores = random_scores(6)
    text = TopWLogitsProcessor(model, beta="0.5+1.5*T", temperature=1.5, lam=1.0)
    number = TopWLogitsProcessor(model, beta=2.75, temperature=1.5, lam=1.0)
    assert torch.equal(text(PROMPT, scores), number(PROMPT, scores))
    assert text.generate_arguments()["temperature"] == 1.5
    # The crop's temperature alone leaves the draw's open, but not with such a beta, which is then taken at 1.
    fixed, free = (TopWLogitsProcessor(model, beta=b, selection_temperature=1.2) for b in ("0.5+1.5*T", "2"))
    assert fixed.generate_arguments()["temperature"] == 1.0
    assert "temperature" not in free.generate_arguments()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"lamm": 1.0}, "unknown parameter 'lamm': did you mean lam"),
        ({"lam": 1.0, "lambda_geom": 1.0}, "lam is given twice"),
        ({"lam": -1.0}, "lam is -1.0"),
        ({"beta": "1.5+T"}, r"beta is '1.5\+T', but must be"),
        ({"top_m": 0}, "top_m is 0"),
        ({"preset": "ours"}, "preset is 'ours', but must be one of paper, released, creative, lively"),
        ({"preset": ["paper"]}, r"preset is \['paper'\], but must be one of paper"),
        ({"geom_unit": "median", "geom_scale": 1.0}, r"no median_distance; measure it with .*median_distance_of"),
        ({"geom_unit": "median", "median_distance": 2.0}, "geom_scale is not given with it"),
        ({"geom_unit": "mean"}, "geom_unit is 'mean', but must be one of raw, median"),
        ({"geom_unit": "median", "median_distance": 0.0, "geom_scale": 1.0}, "median_distance is 0.0, but must be"),
        ({"geom_unit": "median", "median_distance": 2.0, "geom_scale": "1"}, "geom_scale is '1', but must be a finite"),
    ],
)
def test_choices_that_cannot_be_right_are_refused(model, choices, message):
    with pytest.raises(ParameterError, match=message):
        TopWLogitsProcessor(model, **choices)


def test_the_embeddings_may_be_given_in_any_form(model, table):
    scores = random_scores(6)
    module_of = model.get_input_embeddings()
    sources = [model, module_of, table, table.detach(), TensorGeometry.from_embeddings(table, "mahalanobis")]
    masked = [TopWLogitsProcessor(source, **WIDE)(PROMPT, scores) for source in sources]
    assert all(torch.equal(masked[0], other) for other in masked[1:])


def test_a_source_without_embeddings_or_of_another_metric_is_refused(table):
    with pytest.raises(ParameterError, match="mahalanobis needs a model or its embeddings, but was given a NoneType"):
        TopWLogitsProcessor()
    with pytest.raises(ParameterError, match="given a Dropout"):
        TopWLogitsProcessor(nn.Dropout())
    with pytest.raises(ParameterError, match="metric cosine, but a unit geometry"):
        TopWLogitsProcessor(TensorGeometry.from_embeddings(table, "unit"), metric="cosine")


def test_scores_wider_than_the_embedding_table_are_refused_at_the_first_call(model):
    topw = TopWLogitsProcessor(model)
    peaked = torch.zeros(1, VOCAB + 3)
    peaked[0, 0] = 50.0  # one candidate: no distances
    with pytest.raises(ParameterError, match=f"logits are {VOCAB + 3} wide, but the embedding table has {VOCAB} rows"):
        topw(PROMPT, peaked)
    assert topw(PROMPT, peaked[:, : VOCAB - 3]).isfinite().sum() == 1
    assert TopWLogitsProcessor(metric="uniform")(PROMPT, peaked).isfinite().sum() == 1


def test_a_models_geometry_is_computed_once_until_its_table_changes():
    model = tiny_llama(1)
    first = TopWLogitsProcessor(model).geometry
    assert TopWLogitsProcessor(model, lam=1.0).geometry is first
    assert TopWLogitsProcessor(model, metric="unit").geometry is not first
    with torch.no_grad():
        model.get_input_embeddings().weight[3] += 1.0
    again = TopWLogitsProcessor(model).geometry
    assert again is not first
    assert not torch.equal(again.mean, first.mean)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_invalid_row_is_named(model, value):
    scores = random_scores(3)
    scores[2, slice(None) if value == -torch.inf else 7] = value
    with pytest.raises(GenerationError, match=r"row 2 of the batch has NaN, .* at position 4"):
        TopWLogitsProcessor(model)(PROMPT, scores)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_without_its_libraries_the_import_says_what_to_install(library):
    code = f"import sys; sys.modules[{library!r}] = None; import topw_deploy.sampling.processor"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"topw_deploy.sampling.processor needs {library}; run: pip install torch transformers" in done.stderr


# geom_unit="median"

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
