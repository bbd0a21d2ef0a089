"""The workers for other libraries: with transformers, and with a double of onnxruntime-genai."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.toy_model import VOCAB, Toy, export
from topw_deploy.errors import BenchmarkError
from topw_lab.bench.base import PEERS, load_processor
from topw_lab.bench.decode import run
from topw_lab.worker import Worker

GENAI = """
import json


class Config:
    def __init__(self, folder):
        self.folder = folder

    def overlay(self, text):
        self.overlaid = json.loads(text)


class Model:
    def __init__(self, config):
        assert config.overlaid["model"]["decoder"]["session_options"] == {"intra_op_num_threads": 2}


class GeneratorParams:
    def __init__(self, model):
        self.options = None

    def set_search_options(self, **options):
        self.options = options


class Generator:
    def __init__(self, model, params):
        self.options, self.length = params.options, 0

    def append_tokens(self, tokens):
        self.length += tokens.shape[1]

    def generate_next_token(self):
        self.length += 1

    def get_next_tokens(self):
        return [0]

    def is_done(self):
        return self.length >= self.options["max_length"]
"""


def test_genai_decodes_as_many_tokens_as_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime_genai.py").write_text(GENAI, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = {"task": "decode", "folder": "any", "search": {"do_sample": False}, "threads": 2}
    with Worker("genai", PEERS, settings) as worker:
        times = worker.call("run", prompt=[1, 2, 3], new_tokens=7)
    assert times["tokens"] == 7
    assert min(times["first"], times["rest"]) > 0


@pytest.mark.slow
@pytest.mark.long
def test_the_folders_generation_config_does_not_change_transformers_decoding(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, **shape))
    # each would end the run early
    model.generation_config.update(eos_token_id=list(range(VOCAB)), max_length=6)
    model.save_pretrained(tmp_path / "model")
    report = run(
        export(tmp_path / "out", Toy.random(1)),
        prompt_tokens=4,
        new_tokens=6,
        rounds=1,
        transformers=tmp_path / "model",
        peers=("transformers-topw",),
    )
    (side,) = report.runs[0]["sides"].values()
    assert [turn["tokens"] for turn in side["runs"]] == [6]
    assert side["spread"]["low"] > 0


@pytest.mark.slow
def test_a_folder_without_a_model_is_named_in_the_error(tmp_path: Path) -> None:
    settings = {"task": "transformers", "folder": str(tmp_path), "search": {}, "processor": None, "threads": 1}
    with pytest.raises(BenchmarkError, match=r"^transformers, greedy failed: .*Error: .*omit it or repair it\.$"):
        Worker("transformers, greedy", PEERS, settings)


@pytest.mark.parametrize("text", ["class Other: ...", "import nothing_that_is_there", None])
def test_a_wrong_authors_file_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(BenchmarkError, match=r"does not load .* give the authors' logit_processor_w1\.py"):
        load_processor(tmp_path / "mine.py")
