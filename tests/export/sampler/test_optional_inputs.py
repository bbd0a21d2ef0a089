"""An imported decoder that keeps its logits runs without sampler inputs."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from topw_deploy.export import export_model
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def with_logits(foreign_decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("imported") / "out"
    export_model(foreign_decoder, out, with_logits=True)
    return out


def feeds(session: ort.InferenceSession, ids: np.ndarray) -> dict[str, np.ndarray]:
    batch, length = ids.shape
    given = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.broadcast_to(np.arange(length), ids.shape).copy(),
    }
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            given[value.name] = np.zeros((batch, value.shape[1], 0, value.shape[3]), np.float32)
    return given


@pytest.mark.parametrize("batch", [1, 3])
def test_the_decoders_own_logits_need_none_of_the_samplers_inputs(
    foreign_decoder: Path, with_logits: Path, batch: int
) -> None:
    ids = np.random.default_rng(0).integers(3, 280, (batch, 9))
    before = ort.InferenceSession(foreign_decoder / "model.onnx", providers=["CPUExecutionProvider"])
    after = ort.InferenceSession(with_logits / "model.onnx", providers=["CPUExecutionProvider"])
    required = {value.name for value in after.get_inputs()}
    assert required == {value.name for value in before.get_inputs()}
    (wanted,) = before.run(["logits"], feeds(before, ids))
    found, token = after.run(["logits", "next_token"], feeds(after, ids))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(token, wanted[:, -1].argmax(axis=1))


def test_the_runtime_feeds_optional_inputs(foreign_decoder: Path, with_logits: Path, tmp_path: Path) -> None:
    export_model(foreign_decoder, tmp_path / "plain", verify=False)
    setting = {
        "lam": 0.5,
        "temperature": 1.7,
        "seed": 3,
        "max_new_tokens": 12,
        "ignore_eos": True,
        "logit_bias": {7: 4},
    }
    prompts = [[5, 9, 30], [200, 6, 44]]
    with TopWModel.from_pretrained(tmp_path / "plain") as plain, TopWModel.from_pretrained(with_logits) as kept:
        wanted = [plain.generate(prompt, **setting).token_ids for prompt in prompts]
        assert [kept.generate(prompt, **setting).token_ids for prompt in prompts] == wanted
        assert [row.token_ids for row in kept.generate(prompts, **setting)] == wanted


def test_genai_config_is_copied_only_where_genai_can_run_the_export(foreign_decoder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "genai"
    shutil.copytree(foreign_decoder, folder)
    text = '{"model": {"decoder": {"filename": "model.onnx"}},   "search": {}}'
    (folder / "genai_config.json").write_text(text)

    def export(name: str, **options: bool) -> tuple[Path, tuple[str, ...]]:
        return tmp_path / name / "genai_config.json", export_model(
            folder, tmp_path / name, verify=False, **options
        ).notices

    kept, _ = export("kept", with_logits=True)
    assert kept.read_text() == text
    left_out, notices = export("left-out")
    assert not left_out.exists()
    assert any("--with-logits" in notice for notice in notices)
    (folder / "model.onnx").rename(folder / "decoder.onnx")
    (folder / "genai_config.json").write_text(text.replace("model.onnx", "decoder.onnx"))
    renamed, notices = export("renamed", with_logits=True)
    assert not renamed.exists()
    assert any("names decoder.onnx" in notice for notice in notices)


def test_log_probabilities_come_from_the_decoders_own_logits_of_all_positions(with_logits: Path) -> None:
    session = ort.InferenceSession(with_logits / "model.onnx", providers=["CPUExecutionProvider"])
    with TopWModel.from_pretrained(with_logits) as model:
        prompts = [[5, 6, 7, 8], [9, 3]]
        results = model.generate(prompts, max_new_tokens=3, seed=1, logprobs=2, prompt_logprobs=1, ignore_eos=True)
        (alone,) = model.generate(prompts[1:], max_new_tokens=3, seed=results[1].seed, logprobs=2, ignore_eos=True)
    assert alone.token_logprobs is not None
    for prompt, result in zip(prompts, results, strict=True):
        tokens = prompt + result.token_ids
        (own,) = session.run(["logits"], feeds(session, np.array([tokens])))
        logits = own[0].astype(np.float64)  # [tokens, V]
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert result.prompt_logprobs is not None
        assert result.token_logprobs is not None
        entries = [*result.prompt_logprobs[1:], *result.token_logprobs]
        assert [entry.token_id for entry in entries] == tokens[1:]
        found = [entry.logprob for entry in entries]
        np.testing.assert_allclose(found, expected[range(len(found)), tokens[1:]], atol=1e-4)
        best = [entry.top_logprobs[0].logprob for entry in entries]
        np.testing.assert_allclose(best, expected[: len(best)].max(-1), atol=1e-4)
    assert [one.token_id for one in alone.token_logprobs] == alone.token_ids
    np.testing.assert_allclose(
        [one.logprob for one in alone.token_logprobs], [one.logprob for one in results[1].token_logprobs], atol=1e-4
    )
