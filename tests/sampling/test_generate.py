"""Top-W's place in transformers' `generate`, as in docs/guide/transformers.md; examples/custom_generate."""

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import ALIASES
from topw_deploy.sampling.processor import Choices, TopWLogitsProcessor
from topw_deploy.tiny import TINY_MODEL

from .tiny import EOS, PAD, WIDE, kept_sets, model, reference_sets, table

__all__ = ["model", "table"]

ROOT = Path(__file__).parents[2]
PROMPT = torch.tensor([[1, 5, 9, 30]])
# Two prompts, the first left-padded.
BATCH = {
    "input_ids": torch.tensor([[PAD, PAD, 1, 5], [1, 5, 9, 30]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
}
EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 8}


class Seen(LogitsProcessor):
    """Records scores unchanged."""

    def __init__(self):
        self.scores = []

    def __call__(self, input_ids, scores):
        self.scores.append(scores.clone())
        return scores


def run(model, topw, seed=0, before=(), **arguments):
    torch.manual_seed(seed)
    settings = topw.generate_arguments() | {"logits_processor": LogitsProcessorList([*before, topw])}
    return model.generate(**(settings | EVERYTHING | arguments))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_each_step_of_each_row_keeps_what_the_definition_keeps_and_draws_at_the_temperature(model, table, temperature):
    topw = TopWLogitsProcessor(model, temperature=temperature, **WIDE)
    out = run(model, topw, **BATCH)
    sizes = set()
    for logits, scores in zip(out.logits, out.scores, strict=True):
        assert kept_sets(scores) == reference_sets(topw, logits, table)
        kept = scores.isfinite()
        torch.testing.assert_close(scores[kept], logits[kept] / temperature)
        sizes |= set(kept.sum(1).tolist())
    assert len(sizes) > 3
    for step, token in enumerate(out.sequences[:, BATCH["input_ids"].shape[1] :].T):
        drawn = out.scores[step].gather(1, token[:, None])
        assert (drawn.isfinite()[:, 0] | (token == PAD)).all()


def test_a_greedy_processor_draws_the_largest_logit(model):
    greedy = model.generate(PROMPT, do_sample=False, max_new_tokens=8)
    out = run(model, TopWLogitsProcessor(model, temperature=0.0), inputs=PROMPT)
    assert torch.equal(out.sequences, greedy)


# Before Top-W


def test_it_sees_penalties_bans_and_biases_but_no_temperature(model):
    seen = Seen()
    topw = TopWLogitsProcessor(model, temperature=0.5, **WIDE)
    out = run(
        model, topw, inputs=PROMPT, before=[seen], repetition_penalty=1.7, min_new_tokens=8,
        bad_words_ids=[[7]], suppress_tokens=[11], sequence_bias=[[[13], 2.0]],
    )  # fmt: skip
    for step, scores in enumerate(seen.scores):
        raw, shown = out.logits[step][0], scores[0]
        assert shown[[EOS, 7, 11]].isneginf().all()
        so_far = set(out.sequences[0, : 4 + step].tolist())
        for token in so_far - {EOS, 7, 11, 13}:
            expected = raw[token] / 1.7 if raw[token] > 0 else raw[token] * 1.7
            assert shown[token] == pytest.approx(expected.item(), rel=1e-6)
        if 13 not in so_far:
            assert shown[13] == pytest.approx(raw[13].item() + 2.0, rel=1e-6)
        free = [t for t in range(20, 320) if t not in so_far]
        assert torch.equal(shown[free], raw[free])
        assert not out.scores[step][0, [EOS, 7, 11]].isfinite().any()


def test_a_custom_penalty_after_top_w_does_not_reach_the_crop_but_generates_own_does(model, table):
    prompt, behind = torch.arange(60, 90)[None], RepetitionPenaltyLogitsProcessor(0.1)
    topw = TopWLogitsProcessor(model, **WIDE)
    settings = topw.generate_arguments() | {"logits_processor": LogitsProcessorList([topw, behind])}
    out = model.generate(prompt, **settings, **EVERYTHING)
    assert kept_sets(out.scores[0]) == reference_sets(topw, out.logits[0], table)
    out = run(model, topw, inputs=prompt, repetition_penalty=0.1)
    penalised = behind(prompt, out.logits[0])
    assert kept_sets(out.scores[0]) == reference_sets(topw, penalised, table)
    assert reference_sets(topw, penalised, table) != reference_sets(topw, out.logits[0], table)


# After Top-W


def test_selection_temperature_chooses_the_crop_and_generates_temperature_only_the_draw(model, table):
    topw = TopWLogitsProcessor(model, selection_temperature=1.5, **WIDE)
    out = run(model, topw, inputs=PROMPT, temperature=0.25)
    at_draw = TopWLogitsProcessor(model, temperature=0.25, **WIDE)
    differ = 0
    for logits, scores in zip(out.logits, out.scores, strict=True):
        assert kept_sets(scores) == reference_sets(topw, logits, table)
        torch.testing.assert_close(scores[scores.isfinite()], logits[scores.isfinite()] / 0.25)
        differ += reference_sets(at_draw, logits, table) != kept_sets(scores)
    assert differ > 5


@pytest.mark.parametrize(
    ("told", "drawn", "message"),
    [
        ({}, 0.5, "draws at temperature 0.5, but the processor has 1.0; give both the same"),
        ({"temperature": 0.5}, 1.0, "draws at temperature 1.0, but the processor has 0.5"),
        ({"temperature": 0.5, "selection_temperature": 1.0}, 0.7, "draws at temperature 0.7"),
    ],
)
def test_two_temperatures_without_a_selection_temperature_are_refused(model, told, drawn, message):
    with pytest.raises(ParameterError, match=message):
        run(model, TopWLogitsProcessor(model, **told), inputs=PROMPT, temperature=drawn)


def test_generates_default_top_k_of_50_is_refused(model):
    topw = TopWLogitsProcessor(model, **WIDE)
    with pytest.raises(ParameterError, match=r"top_k=50 after Top-W \(its default\), .* pass top_k=0"):
        model.generate(PROMPT, do_sample=True, logits_processor=[topw], max_new_tokens=3)
    model.generate(PROMPT, do_sample=True, top_k=0, logits_processor=[topw], max_new_tokens=3)


@pytest.mark.parametrize(
    "other",
    [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}, {"epsilon_cutoff": 1e-3}, {"eta_cutoff": 1e-3}],
)
def test_another_truncation_after_it_is_refused_also_from_the_models_configuration(model, other, monkeypatch):
    name = next(iter(other))
    with pytest.raises(ParameterError, match=f"generate applies {name}=.* after Top-W"):
        run(model, TopWLogitsProcessor(model), inputs=PROMPT, **other)
    monkeypatch.setattr(model.generation_config, name, other[name])
    with pytest.raises(ParameterError, match=f"generate applies {name}="):
        model.generate(
            PROMPT,
            do_sample=True,
            logits_processor=[TopWLogitsProcessor(model)],
            max_new_tokens=3,
            **({} if name == "top_k" else {"top_k": 0}),
        )
    run(model, TopWLogitsProcessor(model), inputs=PROMPT)  # its arguments disable it
    if name == "min_p":
        run(model, TopWLogitsProcessor(model), inputs=PROMPT, min_p=0.0)


@pytest.mark.parametrize("do_sample", [True, False])
def test_beam_search_is_refused(model, do_sample):
    topw = TopWLogitsProcessor(model)
    with pytest.raises(ParameterError, match=r"generate runs a beam search, .* pass num_beams=1"):
        model.generate(PROMPT, num_beams=2, do_sample=do_sample, top_k=0, logits_processor=[topw], max_new_tokens=3)


def test_without_sampling_it_changes_nothing(model):
    plain = model.generate(PROMPT, do_sample=False, max_new_tokens=12)
    cropped = model.generate(PROMPT, do_sample=False, max_new_tokens=12, logits_processor=[TopWLogitsProcessor(model)])
    assert torch.equal(plain, cropped)


# The example, without export or network

EXAMPLE = str(ROOT / "examples" / "custom_generate")


@pytest.fixture(autouse=True)
def modules_in_a_folder_of_their_own(tmp_path, monkeypatch):
    """transformers imports trusted code from a copy in the user's home, which is a temporary folder here."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)


def custom(model, **arguments):
    torch.manual_seed(0)
    return model.generate(
        inputs=PROMPT,
        custom_generate=EXAMPLE,
        trust_remote_code=True,
        **(EVERYTHING | arguments),
    )


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


# The guide

PAGE = (ROOT / "docs" / "guide" / "transformers.md").read_text(encoding="utf-8")


def offline(block):
    """The example with the bundled model in place of the hub's."""
    assert block.count('"HuggingFaceTB/SmolLM2-135M-Instruct"') == block.count("name = ")
    return block.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(str(TINY_MODEL)))


@pytest.mark.slow
def test_every_example_of_the_page_runs_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(offline(block), names)
    assert capsys.readouterr().out.startswith("The sea is")
    assert isinstance(names["topw"], TopWLogitsProcessor)
    assert names["crop"].keep_mask.sum() == names["crop"].kept.sum() > 0


def test_the_example_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "TopWLogitsProcessor" in text)
    names = {}
    exec(offline(block), names)
    assert isinstance(names["topw"], TopWLogitsProcessor)
    assert names["tokens"].shape[1] > names["inputs"]["input_ids"].shape[1]
    assert capsys.readouterr().out.startswith("The sea is")


@pytest.mark.parametrize("name", [*Choices.__annotations__, *ALIASES, "preset"])
def test_the_page_names_every_choice(name):
    assert f"`{name}`" in PAGE or f"{name}=" in PAGE
