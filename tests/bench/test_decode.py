"""`topw bench decode`: the ArgMax loop, the report, and the sides that can or cannot run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from tests.support.toy_graph import FORMS
from tests.support.toy_model import Toy, export
from topw_deploy import install
from topw_deploy.errors import BenchmarkError, ManifestError, ParameterError
from topw_deploy.export.verification.reference import decoder_model, open_graph
from topw_deploy.manifest import load_decoder_manifest
from topw_deploy.plugins.library import library_path
from topw_lab.bench.decode import ArgMaxLoop, run, sides

PROMPT = [5, 9, 40, 7]


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy.random(3)


@pytest.fixture(scope="module")
def folder(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("decode") / "out", toy)


@pytest.mark.parametrize("form", FORMS)
def test_the_argmax_loop_takes_the_largest_logit_of_the_same_decoder(toy: Toy, tmp_path: Path, form: str) -> None:
    folder = export(tmp_path / "out", toy, form=form)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    decoder = load_decoder_manifest(folder).decoder
    loop = ArgMaxLoop(open_graph(folder, decoder_model(folder, argmax=True)), decoder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for _ in range(2):  # the second prompt starts with an empty cache
        tokens = [loop.prefill(PROMPT, 20), *(loop.step() for _ in range(8))]
        sequence = list(PROMPT)
        for token in tokens:
            assert token == int(np.argmax(toy.logits(sequence)))
            sequence.append(token)


@pytest.mark.long
def test_the_command_reports_every_side_for_every_number_of_threads(
    bench: Callable[..., Result], folder: Path, tmp_path: Path
) -> None:
    native = ["topw-native"] if library_path() is not None else []
    done = bench("decode", folder, "--prompt-tokens", 5, "--new-tokens", 4, "--rounds", 2, "--threads", "1,2",
                 "--peers", ",".join([*native, "topw-graph", "argmax"]), "--json", tmp_path / "out.json",
                 "--plot", tmp_path / "out.png")  # fmt: skip
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "out.json").read_text())
    for count, run_ in zip(("1 thread", "2 threads"), document["runs"], strict=True):
        assert run_["title"].startswith(count)
        assert list(run_["sides"]) == [*native, "topw-graph", "argmax"]
        for side in run_["sides"].values():
            assert [one["tokens"] for one in side["runs"]] == [4, 4]
            assert side["spread"]["median"] == pytest.approx(np.median([one["rest"] / 3 for one in side["runs"]]))
        assert run_["sides"][run_["reference"]]["ratio"]["median"] == 1.0
    assert "2 threads, 5 + 4 tokens; the ratio is to TopWModel" in done.stdout
    assert "| same graph, ArgMax" in done.stdout
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(folder.parent.glob(".topw-bench-*"))


def test_a_peer_without_a_folder_says_what_to_give_and_its_interpreter_needs_nothing_here(tmp_path: Path) -> None:
    reasons = {side.name: side.why_not for side in sides(tmp_path)}
    assert reasons["topw-graph"] is reasons["argmax"] is None
    assert "--transformers MODEL_DIR" in str(reasons["transformers-greedy"])
    assert "onnxruntime_genai.models.builder" in str(reasons["genai-top-p"])
    there = sides(tmp_path, genai=tmp_path, genai_python=tmp_path / "python")
    genai = [side for side in there if side.name.startswith("genai")]
    assert [(side.python, side.why_not) for side in genai] == [(tmp_path / "python", None)] * 3


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"peers": ("transformers-greedy",)}, BenchmarkError, "transformers, greedy was requested, but is without"),
        ({"peers": ("vllm",)}, ParameterError, "'vllm' is not a side of this benchmark; choose from topw-native, "),
        ({"genai": Path()}, BenchmarkError, "is given, but onnxruntime-genai is not installed: pip install"),
        ({"authors": Path("x.py")}, ParameterError, "give --transformers"),
        ({"prompt_tokens": 90, "new_tokens": 10}, ParameterError, r"90 \+ 10 tokens exceed the context of 96"),
        ({"folder": Path("nowhere")}, ManifestError, "nowhere"),
    ],
)
def test_a_request_that_cannot_run_is_refused(
    folder: Path, changes: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "is_importable", lambda module: module != "onnxruntime_genai")
    with pytest.raises(error, match=message):
        run(**{"folder": folder, "prompt_tokens": 5, "new_tokens": 4, **changes})
