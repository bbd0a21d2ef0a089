"""The local tasks, run completely on the bundled model: scores and answers are torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

TASKS = Path(__file__).parents[2] / "examples" / "lm_eval"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with its logits."""
    from topw_deploy.export import export_model

    output = tmp_path_factory.mktemp("demo") / "out"
    export_model("tiny", output, verify=False, with_logits=True)
    return output


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    import topw_lab.harness  # noqa: F401

    found: dict[str, Any] = lm_eval.simple_evaluate(
        model="topw_deploy",
        model_args=f"path={folder},provider=cpu,intra_op_num_threads=1",
        tasks=["topw_demo_complete", "topw_demo_choose", "topw_demo_text"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        batch_size=4,
        bootstrap_iters=0,
    )
    return found


@pytest.fixture(scope="module")
def torch_likelihood() -> Callable[[list[int], int], float]:
    import torch
    from transformers import AutoModelForCausalLM

    from topw_deploy.tiny import TINY_MODEL

    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()

    def likelihood(tokens: list[int], start: int) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        return sum(float(logits[end - 1, tokens[end]]) for end in range(start, len(tokens)))

    return likelihood


def samples(results: dict[str, Any], task: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = results["samples"][task]
    return found


def test_each_task_has_its_measures(results: dict[str, Any]) -> None:
    measured = results["results"]
    assert measured["topw_demo_choose"]["acc,none"] >= 0.75, "chance is 0.25"
    assert measured["topw_demo_complete"]["exact_match,first-word"] > 0
    assert 1 < measured["topw_demo_text"]["bits_per_byte,none"] < 3
    assert results["config"]["topw_sampler"] in ("native", "graph")


def test_scores_of_choices_are_torch_s(
    results: dict[str, Any], folder: Path, torch_likelihood: Callable[[list[int], int], float]
) -> None:
    from topw_deploy.runtime import TopWModel

    encode = TopWModel.from_pretrained(folder, provider="cpu").tokenizer.encode
    lengths = set()
    for sample in samples(results, "topw_demo_choose"):
        for choice, ((total, _),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            context, whole = encode(sample["doc"]["text"]), encode(sample["doc"]["text"] + choice)
            lengths.add(len(whole) - len(context))
            assert float(total) == pytest.approx(torch_likelihood(whole, len(context)), abs=1e-3)
    assert {1, 2} <= lengths, "both ways of scoring"


def test_texts_have_torch_s_perplexity(
    results: dict[str, Any], folder: Path, torch_likelihood: Callable[[list[int], int], float]
) -> None:
    from topw_deploy.runtime import TopWModel

    tokenizer = TopWModel.from_pretrained(folder, provider="cpu").tokenizer
    texts = [sample["doc"]["text"] for sample in samples(results, "topw_demo_text")]
    total = sum(torch_likelihood([tokenizer.bos_token_id or 0, *tokenizer.encode(text)], 1) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert results["results"]["topw_demo_text"]["bits_per_byte,none"] == pytest.approx(
        -total / size / math.log(2), abs=1e-5
    )


def test_answers_are_transformers_greedy_ones(results: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from topw_deploy.tiny import TINY_MODEL

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    for sample in samples(results, "topw_demo_complete"):
        inputs = tokenizer(sample["doc"]["text"], return_tensors="pt", return_token_type_ids=False)
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert sample["resps"] == [[text.split("\n")[0]]]
