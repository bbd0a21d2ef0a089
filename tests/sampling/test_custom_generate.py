"""examples/custom_generate runs Top-W through `generate(custom_generate=...)`, without export or network."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.processor import TopWLogitsProcessor

from .tiny import WIDE, Seen, kept_sets, reference_sets

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "custom_generate")
PROMPT = torch.tensor([[1, 5, 9, 30]])
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 6}


@pytest.fixture(autouse=True)
def modules_in_a_folder_of_their_own(tmp_path, monkeypatch):
    """transformers imports trusted code from a copy in the user's home, which is a temporary folder here."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)


def custom(model, **arguments):
    torch.manual_seed(0)
    return model.generate(inputs=PROMPT, custom_generate=EXAMPLE, trust_remote_code=True, **(EVERYTHING | arguments))


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"preset": "released", "temperature": 2.0},
        WIDE | {"metric": "unit"},
        WIDE | {"geom_unit": "median", "median_distance": 0.25},
        {"lam": 1.0},
    ],
)
def test_it_generates_what_the_processor_does(model, choices):
    topw = TopWLogitsProcessor(model, **choices)
    torch.manual_seed(0)
    direct = model.generate(PROMPT, **topw.generate_arguments(), **EVERYTHING)
    out = custom(model, **choices)
    assert torch.equal(out.sequences, direct.sequences)
    for logits, scores in zip(out.logits, out.scores, strict=True):
        assert kept_sets(scores) == reference_sets(topw, logits, model.get_input_embeddings().weight)


def test_the_temperature_of_the_models_configuration_is_the_crops_too(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "temperature", 1.75)
    out, told = custom(model, **WIDE), custom(model, temperature=1.75, **WIDE)
    assert torch.equal(out.sequences, told.sequences)
    assert kept_sets(out.scores[0]) == reference_sets(
        TopWLogitsProcessor(model, temperature=1.75, **WIDE), out.logits[0], model.get_input_embeddings().weight
    )


def test_top_w_comes_after_the_users_processors_and_generates_penalties(model):
    seen = Seen()
    out = custom(model, logits_processor=[seen], repetition_penalty=0.1, **WIDE)
    topw = TopWLogitsProcessor(model, **WIDE)
    table = model.get_input_embeddings().weight
    assert [kept_sets(scores) for scores in out.scores] == [reference_sets(topw, s, table) for s in seen.scores]
    assert not torch.equal(seen.scores[0], out.logits[0])


@pytest.mark.parametrize("other", [{"top_k": 5}, {"top_p": 0.9}, {"num_beams": 2}, {"do_sample": False}])
def test_arguments_that_conflict_with_top_w_are_refused(model, other):
    name, value = next(iter(other.items()))
    with pytest.raises(ParameterError, match=f"{name} is {value}, but Top-W needs .*; leave it out"):
        custom(model, **other)
