"""The workers for other libraries: with transformers, and with a double of onnxruntime-genai."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.toy_model import VOCAB, Toy, export
from topw_deploy.errors import BenchmarkError
from topw_lab.bench.decode import DecodeRequest, run
from topw_lab.bench.sides import FOLDER
from topw_lab.worker import Worker

GENAI = '''
import json
import numpy as np

__version__ = "0.0"


class Config:
    def __init__(self, folder):
        self.folder = folder

    def overlay(self, text):
        self.overlaid = json.loads(text)


class Model:
    def __init__(self, config):
        if isinstance(config, Config):
            assert config.overlaid["model"]["decoder"]["session_options"] == {"intra_op_num_threads": 2}


class GeneratorParams:
    def __init__(self, model):
        self.options = None

    def set_search_options(self, **options):
        self.options = options


class Generator:
    """Accepts logits only after some were computed, as the real one does."""

    def __init__(self, model, params):
        self.options, self.length, self.computed, self.logits = params.options, 0, False, None

    def rewind_to(self, length):
        self.length, self.computed = length, False

    def append_tokens(self, tokens):
        self.length, self.computed = self.length + tokens.shape[1], True

    def set_logits(self, logits):
        assert self.computed, "logits are not computed yet"
        self.logits = logits

    def generate_next_token(self):
        self.length, self.computed = self.length + 1, False

    def get_next_tokens(self):
        return [0] if self.logits is None else self.logits[:, 0].argmax(axis=1)

    def is_done(self):
        return self.length >= self.options["max_length"]
'''


@pytest.fixture
def genai(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "onnxruntime_genai.py").write_text(GENAI, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))


@pytest.mark.usefixtures("genai")
def test_genai_gets_the_logits_of_the_case_before_every_draw(tmp_path: Path) -> None:
    rows = [np.eye(2, 9, k=shift, dtype=np.float32) for shift in (0, 5)]
    for index, logits in enumerate(rows):
        np.save(tmp_path / f"logits-{index}.npy", logits)
    settings = {
        "task": "sample",
        "folder": str(tmp_path),
        "sides": {"genai-greedy": {"do_sample": False}},
        "temperatures": [1.0, 2.0],
    }
    with Worker("genai", FOLDER / "genai.py", settings) as worker:
        for case, tokens in enumerate(([0, 1], [5, 6])):
            assert worker.call("time", side="genai-greedy", case=case) > 0
            assert worker.call("tokens", side="genai-greedy", case=case) == tokens


@pytest.mark.usefixtures("genai")
def test_genai_decodes_as_many_tokens_as_are_asked_for() -> None:
    settings = {"task": "decode", "folder": "any", "search": {"do_sample": False}, "threads": 2}
    with Worker("genai", FOLDER / "genai.py", settings) as worker:
        found = worker.call("run", prompt=[1, 2, 3], new_tokens=7)
    assert found["tokens"] == 7
    assert found["first"] > 0
    assert found["rest"] > 0


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
    asked = DecodeRequest(
        folder=export(tmp_path / "out", Toy.random(1)),
        prompt_tokens=4,
        new_tokens=6,
        rounds=1,
        transformers=tmp_path / "model",
        peers=("transformers-topw",),
    )
    (found,) = run(asked).results["runs"]
    assert found["reference"] == "transformers-topw"
    (side,) = found["sides"].values()
    assert [turn["tokens"] for turn in side["runs"]] == [6]
    assert side["seconds_per_token"]["low"] > 0


@pytest.mark.slow
def test_a_folder_without_a_model_is_named_in_the_error(tmp_path: Path) -> None:
    settings = {"library": "transformers", "folder": str(tmp_path), "search": {}, "processor": None, "threads": 1}
    with pytest.raises(BenchmarkError, match=r"^transformers, greedy failed: .*Error: .*omit it or repair it\.$"):
        Worker("transformers, greedy", FOLDER / "generate.py", settings)
