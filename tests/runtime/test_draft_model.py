"""Speculation with a draft model: the texts are those without it, and its drafts are what it would draw itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.runtime.test_speculate import GREEDY, MIN_P, PROMPT, WARM, assert_same
from tests.support.hybrid_models import make_hybrid
from tests.support.invoking import Invoke, invoke  # noqa: F401  # a fixture
from tests.support.tiny_models import COMMON, export, make_model, write_tokenizer
from tests.support.toy_model import Toy, export_sampler
from topw_deploy.engine import Engine
from topw_deploy.errors import ManifestError, ParameterError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.draft_model import ModelDrafts
from topw_deploy.runtime.speculate import Acceptance, DraftSource, RunCosts, Seconds

pytestmark = pytest.mark.slow

HOT: dict[str, Any] = {**GREEDY, "temperature": 0.3, "min_p": 0.05}
PARAMETERS = (GREEDY, WARM, MIN_P, HOT)
NOISE = 0.003  # of a weight, in standard deviations of its tensor
OPENING: dict[str, Any] = {"provider": "cpu", "intra_op_num_threads": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and drafts of its tokenizer: with a little noise, with one layer, and with a short context."""
    folder, found = tmp_path_factory.mktemp("draft"), {}
    family = {**COMMON, "head_dim": 16, "tie_word_embeddings": False}
    changes: dict[str, dict[str, Any]] = {
        "target": {}, "noisy": {}, "shallow": {"num_hidden_layers": 1}, "short": {"max_position_embeddings": 40}
    }  # fmt: skip
    for name, change in changes.items():
        model = make_model(LlamaConfig(**{**family, **change}))
        with torch.no_grad():
            for weight in model.parameters() if name == "noisy" else ():
                weight.add_(NOISE * weight.std() * torch.randn_like(weight)) if weight.dim() > 1 else None
        model.save_pretrained(folder / name / "model")
        write_tokenizer(folder / name / "model")
        export(folder / name / "model", folder / name / "out", with_logits=name == "target")
        found[name] = folder / name / "out"
    return found


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> TopWModel:
    return TopWModel.from_pretrained(folders["target"], **OPENING, draft_model=folders["noisy"])


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes every run with a draft as wide as it may be, up to 6 columns. Returns the widths of the runs."""
    widths: list[int] = []

    def choose(_: RunCosts, drafts: DraftSource, most: int) -> int:
        widths.append(min(6, most) if drafts.is_ready else 1)
        return widths[-1]

    monkeypatch.setattr(RunCosts, "choose", choose)
    return widths


@pytest.mark.parametrize("draft", ["target", "noisy", "shallow", "short"])
def test_the_tokens_are_those_without_a_draft_model(folders: dict[str, Path], columns: list[int], draft: str) -> None:
    model = TopWModel.from_pretrained(folders["target"], **OPENING, draft_model=str(folders[draft]))
    for seed in range(3):
        for given in PARAMETERS:
            expected = model.generate(PROMPT, speculate="off", **{**given, "seed": seed})
            columns.clear()
            found = model.generate(PROMPT, **{**given, "seed": seed})
            assert_same(found, expected)
            assert len(columns) == len(found.token_ids) - 1 - found.accepted_tokens
            assert draft != "target" or found.accepted_tokens == found.drafted_tokens > 30


def test_draws_of_a_similar_model_agree_where_many_tokens_are_likely(model: TopWModel, columns: list[int]) -> None:
    results = [model.generate(PROMPT, **{**HOT, "seed": seed}) for seed in range(6)]
    right, drafted = (sum(getattr(each, name) for each in results) for name in ("accepted_tokens", "drafted_tokens"))
    assert sum(sum(each.kept) for each in results) > 20 * sum(len(each.kept) for each in results)
    # A run drafts 5 tokens. If 1 of 20 independent draws agreed, 1 % of the drafts would be accepted.
    assert right > 0.3 * drafted


def test_drafts_after_rejected_ones_are_what_the_draft_model_draws_alone(
    folders: dict[str, Path], columns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TopWModel.from_pretrained(folders["target"], **OPENING, draft_model=folders["noisy"])
    alone = TopWModel.from_pretrained(folders["noisy"], **OPENING)
    seen: list[tuple[list[int], list[int]]] = []
    draft = ModelDrafts.draft

    def noted(self: ModelDrafts, count: int) -> list[int]:
        seen.append((list(self.tokens), draft(self, count)))
        return seen[-1][1]

    monkeypatch.setattr(ModelDrafts, "draft", noted)
    result = model.generate(PROMPT, **HOT)
    assert 0 < result.accepted_tokens < result.drafted_tokens
    for tokens, drafted in seen:
        given = {**HOT, "max_new_tokens": len(drafted), "speculate": "off"}
        assert drafted == alone.generate(tokens, **given).token_ids


@pytest.mark.parametrize("place", range(2, 14))
def test_a_stop_token_among_accepted_drafts_ends_the_text(model: TopWModel, columns: list[int], place: int) -> None:
    whole = model.generate(PROMPT, speculate="off", **GREEDY).token_ids
    for given in ({**GREEDY, "stop_token_ids": [whole[place]]}, {**GREEDY, "max_new_tokens": place}):
        assert_same(model.generate(PROMPT, **given), model.generate(PROMPT, speculate="off", **given))


def test_stop_strings_and_streamed_pieces_are_those_without(model: TopWModel, columns: list[int]) -> None:
    whole = model.generate(PROMPT, speculate="off", **GREEDY).text
    for given in (GREEDY, {**GREEDY, "stop_strings": [whole[len(whole) // 2 :][:5]]}):
        streams = [list(model.stream(PROMPT, **given, speculate=source)) for source in ("off", "model")]
        expected, found = ([(piece.text, piece.drawn, piece.token_ids) for piece in pieces] for pieces in streams)
        assert found == expected


def test_a_text_may_fill_the_context(folders: dict[str, Path], columns: list[int]) -> None:
    opening = {**OPENING, "max_length": 64, "max_batch": 1}
    for draft in ("noisy", "short"):  # with a context of 40 tokens
        model = TopWModel.from_pretrained(folders["target"], **opening, draft_model=folders[draft])
        given = {**GREEDY, "max_new_tokens": 1000}
        found = model.generate(PROMPT, **given)
        assert_same(found, model.generate(PROMPT, speculate="off", **given))
        assert found.accepted_tokens > 5


@pytest.mark.parametrize(
    "more",
    [{"repetition_penalty": 1.2}, {"logprobs": 1}, {"structured_outputs": {"regex": "[a-z ]*"}}, {"speculate": "off"}],
)
def test_a_request_is_drafted_unless_its_sampling_changes_or_it_says_off(
    model: TopWModel, columns: list[int], more: dict[str, Any]
) -> None:
    assert model.generate(PROMPT, **{**GREEDY, **more}).drafted_tokens == 0
    assert not columns
    assert model.generate(PROMPT, speculate="prompt", **GREEDY).drafted_tokens > 0


def test_an_engine_draws_the_same_tokens_and_frees_the_caches_of_drafts(model: TopWModel, columns: list[int]) -> None:
    given = [{"prompt": PROMPT[place % 5 :], **PARAMETERS[place % 4], "seed": place} for place in range(8)]
    expected = [model.generate(**each, speculate="off") for each in given]
    with Engine(model, max_batch=4, max_length=128) as engine:
        for request, result in zip([engine.submit(**each) for each in given], expected, strict=True):
            assert_same(request.result(60), result)
        for each, result in zip(given, expected, strict=True):
            assert_same(engine.submit(**each).result(60), result)
        stats = engine.stats()
        assert stats.drafted_tokens > stats.accepted_tokens > 100
        unended = engine.submit(PROMPT, **GREEDY)
        unended.cancel()
    assert model.draft_model is not None
    assert model.draft_model.pool._lent_bytes == 0


@pytest.mark.parametrize(
    ("draft", "target", "message"),
    [
        ("other", "target", r"its tokenizer has other tokens than that of .*; give a smaller model"),
        ("concat", "target", r"its cache is concat and not static; export"),
        ("recurrent", "target", r"it has states of fixed size, .*; give a model without"),
        ("few rules", "target", r"it lacks the rules epsilon, .*; export it again"),
        ("target", "concat", r"concat/out cannot draw several tokens in a run; omit draft_model, or export"),
    ],
)
def test_models_that_cannot_draft_are_refused(
    folders: dict[str, Path], tmp_path: Path, draft: str, target: str, message: str
) -> None:
    def folder(name: str) -> Path:
        if name in folders:
            return folders[name]
        source = make_hybrid("lfm2") if name == "recurrent" else make_model("llama_untied")
        source.save_pretrained(tmp_path / name / "model")
        write_tokenizer(tmp_path / name / "model")
        if name == "other":
            file = tmp_path / name / "model" / "tokenizer.json"
            file.write_text(file.read_text().replace('"<pad>"', '"<none>"'))
        settings = {"concat": {"kv": "concat"}, "few rules": {"rules": ("top_w", "min_p")}}.get(name, {})
        export(tmp_path / name / "model", tmp_path / name / "out", **settings)
        return tmp_path / name / "out"

    with pytest.raises(ParameterError, match=message):
        TopWModel.from_pretrained(folder(target), provider="cpu", draft_model=folder(draft))


def test_a_sampler_alone_and_a_missing_draft_model_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    sampler = export_sampler(tmp_path / "sampler", Toy.random(1))
    with pytest.raises(ManifestError, match="holds a sampler without a decoder; give another folder"):
        TopWModel.from_pretrained(folders["target"], draft_model=sampler)
    model = TopWModel.from_pretrained(folders["target"], **OPENING)
    with pytest.raises(ParameterError, match="no draft model is open; open the model with draft_model, or give 'pro"):
        model.generate(PROMPT, speculate="model", **GREEDY)


class Simulated(ModelDrafts):
    """Drafts of a sequence, of which a share of `rate` is right, each in `cost` steps of the target."""

    def __init__(self, model: SimpleNamespace, cost: float, rate: float) -> None:
        params = SimpleNamespace(seed=0, budget=model.context_length)
        super().__init__([0], SimpleNamespace(prompt=[0], params=params), model)  # type: ignore[arg-type]
        self._cost, self._rate, self.spent = cost, rate, 0.0

    def _open(self) -> None:
        self._buffers = SimpleNamespace()  # type: ignore[assignment]

    def _run(self, ids: Any, start: int, number: float) -> int:
        seconds = self._cost * (1 + 0.1 * (len(ids) - 1))
        self.spent += seconds
        if len(ids) == 1:
            self._model.step.add(seconds)
        return int(torch.rand(()) < self._rate)  # 1 is right


def seconds_per_token(model: SimpleNamespace, costs: RunCosts, cost: float, rate: float) -> float:
    """The mean of 20 sequences of 200 tokens, in steps of the target, whose columns take a twentieth each."""
    total, drawn = 0.0, 0
    for _ in range(20):
        drafts = Simulated(model, cost, rate)
        while len(drafts.tokens) < 200:
            columns, before = costs.choose(drafts, 16), drafts.spent
            drafted = drafts.draft(columns - 1) if columns > 1 else []
            right = 1 + next((place for place, token in enumerate(drafted) if token != 1), len(drafted))
            costs.add(columns, 1 + 0.05 * (columns - 1), right, drafts.spent - before)
            total += 1 + 0.05 * (columns - 1) + drafts.spent - before
            drawn += right
            for _ in range(right):
                drafts.add(1)
    return total / drawn


@pytest.mark.parametrize("cost", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6])
def test_drafts_that_do_not_pay_cost_three_percent_at_most_and_are_tried_again(cost: float, rate: float) -> None:
    torch.manual_seed(0)
    model = SimpleNamespace(context_length=256, chunk=256, step=Seconds(), token_share=0.1, accepted=Acceptance())
    costs = RunCosts()
    assert seconds_per_token(model, costs, cost, rate) < 1.03
    later = [seconds_per_token(model, costs, cost, 0.95) for _ in range(2)][1]
    # 16 columns at 0.95 give 11 tokens for 1.75 steps and 15 drafts.
    assert later < {0.1: 0.35, 0.3: 0.65, 1.0: 1.03}[cost]


def test_the_command_generates_the_same_text_with_a_draft_model(
    invoke: Invoke,  # noqa: F811
    folders: dict[str, Path],
) -> None:
    words = ("generate", folders["target"], "def parse(", "--seed", 3, "-n", 40, "--ignore-eos", "--stats")
    plain, drafted = invoke(*words), invoke(*words, "--draft-model", folders["target"])
    assert (plain.exit_code, drafted.exit_code, drafted.stdout) == (0, 0, plain.stdout)
    assert "drafted tokens accepted" in drafted.stderr
    assert "drafted" not in invoke(*words, "--draft-model", folders["target"], "--speculate", "off").stderr
