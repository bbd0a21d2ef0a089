"""A graph with Top-W and ArgMax equals graphs with one of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from benchmarks import decode_worker
from benchmarks.decode_worker import CHOICE, write_either
from benchmarks.loops import measure_loops, open_graphs
from tests.support.toy_graph import FORMS, HEAD_DIMS
from tests.support.toy_model import VOCAB, Toy, export
from topw_deploy.runtime.inputs import rule_arrays
from topw_deploy.sampling import RuleParameters, TopWParameters
from topw_lab.worker import Worker

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 40, 7]


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy.random(3)


@pytest.fixture(scope="module")
def folder(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("either") / "out", toy)


def feeds(session: ort.InferenceSession, uniform: float) -> dict[str, np.ndarray]:
    """A high temperature makes draws differ from the argmax."""
    parameters = TopWParameters(temperature=6.0)
    given: dict[str, np.ndarray] = {
        "input_ids": np.array([PROMPT]),
        "attention_mask": np.ones((1, len(PROMPT)), np.int64),
        "position_ids": np.arange(len(PROMPT))[None],
        "uniform": np.array([uniform], np.float32),
        "edit_ids": np.zeros((1, 0), np.int64),
        "edit_penalty": np.zeros((1, 0), np.float32),
        "edit_bias": np.zeros((1, 0), np.float32),
        "allowed": np.zeros((1, 0), np.int32),
        **rule_arrays([RuleParameters()]),
        **{name: np.array([getattr(parameters, name)], np.float32) for name in TopWParameters.__slots__},
    }
    for node in session.get_inputs():
        if node.name.startswith("past_key_values."):
            _, layer, _ = node.name.split(".")
            given[node.name] = np.zeros((1, node.shape[1], 0, HEAD_DIMS["concat"][int(layer)]), np.float32)
    return given


def test_each_branch_equals_the_model_with_that_sampler_alone(toy: Toy, folder: Path, tmp_path: Path) -> None:
    alone = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    both = ort.InferenceSession(write_either(folder, tmp_path), providers=["CPUExecutionProvider"])
    names = [node.name for node in alone.get_outputs()]
    assert [node.name for node in both.get_outputs()] == names
    drawn = set()
    for uniform in np.linspace(0, 0.99, 12):
        given = feeds(alone, float(uniform))
        wanted = alone.run(names, given)
        found = both.run(names, given | {CHOICE: np.array(False)})
        for name, one, other in zip(names, wanted, found, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
        drawn.add(int(wanted[0][0]))
        (token,) = both.run(["next_token"], given | {CHOICE: np.array(True)})
        assert token.tolist() == [int(np.argmax(toy.logits(PROMPT)))]
    assert len(drawn) > 1, "the draws show nothing"
    assert max(drawn) < VOCAB


@pytest.mark.parametrize("form", FORMS)
def test_every_sampler_and_its_yardstick_take_turns(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    folder = export(tmp_path / "out", toy, form=form)
    monkeypatch.setenv("PYTHONPATH", str(Path(decode_worker.__file__).parents[1]), prepend=os.pathsep)
    settings = {"export": str(folder), "either": str(write_either(folder, tmp_path)), "samplers": ["graph"],
                "threads": 1}  # fmt: skip
    with Worker("the models", Path(decode_worker.__file__), settings) as worker:
        names = worker.call("names")
        assert names == ["graph", "graph argmax", "control"]
        for _ in range(2):
            prompts, steps = measure_loops(dict.fromkeys(names, worker), PROMPT, turns=3, steps=2, seed=0)
            assert worker.call("certified") > 0
    assert {name: len(times) for name, times in prompts.items()} == dict.fromkeys(names, 1)
    assert {name: len(times) for name, times in steps.items()} == dict.fromkeys(names, 3)
    assert min(map(min, steps.values())) > 0


def test_graphs_of_one_model_agree_on_the_first_token(toy: Toy, folder: Path, tmp_path: Path) -> None:
    exports = {"one": folder, "an other": export(tmp_path / "other", toy)}
    with open_graphs(exports, 1) as workers:
        measure_loops(workers, PROMPT, turns=1, steps=1, seed=0)
        assert workers["one"].call("first") == dict.fromkeys(exports, int(np.argmax(toy.logits(PROMPT))))
