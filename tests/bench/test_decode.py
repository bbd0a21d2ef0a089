"""`topw bench decode`: the ArgMax loop, the report, and the sides that can or cannot run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from click.testing import Result

from tests.support.toy_graph import FORMS
from tests.support.toy_model import Toy, export
from topw_deploy import install
from topw_deploy.errors import BenchmarkError, ManifestError, ParameterError
from topw_deploy.manifest import load_decoder_manifest
from topw_deploy.plugins.library import library_path
from topw_lab.bench.decode import ARGMAX_FILE, ArgMaxLoop, DecodeRequest, run, sides, start, write_argmax_model
from topw_lab.bench.sides import FOLDER, choose
from topw_lab.worker import Worker

PROMPT = [5, 9, 40, 7]


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy.random(3)


@pytest.fixture(scope="module")
def folder(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("decode") / "out", toy)


@pytest.fixture
def asked(folder: Path) -> DecodeRequest:
    return DecodeRequest(folder=folder, prompt_tokens=5, new_tokens=4, rounds=2, peers=("topw-graph", "argmax"))


# The ArgMax loop


@pytest.mark.parametrize("form", FORMS)
def test_the_argmax_loop_takes_the_largest_logit_of_the_same_decoder(toy: Toy, tmp_path: Path, form: str) -> None:
    folder = export(tmp_path / "out", toy, form=form)
    decoder = load_decoder_manifest(folder).decoder
    loop = ArgMaxLoop(write_argmax_model(folder, tmp_path), decoder, ort.SessionOptions())
    decoding = loop.prefill(PROMPT, 20)
    tokens = [decoding.token, *(decoding.step() for _ in range(8))]
    sequence = list(PROMPT)
    for token in tokens:
        assert token == int(np.argmax(toy.logits(sequence)))
        sequence.append(token)


def test_a_second_prompt_starts_with_an_empty_cache(folder: Path, tmp_path: Path) -> None:
    decoder = load_decoder_manifest(folder).decoder
    loop = ArgMaxLoop(write_argmax_model(folder, tmp_path), decoder, ort.SessionOptions())

    def decode() -> list[int]:
        decoding = loop.prefill(PROMPT, 20)
        return [decoding.token, *(decoding.step() for _ in range(5))]

    assert decode() == decode()


def test_writing_the_argmax_graph_does_not_change_the_export(folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_argmax_model(folder, tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert (tmp_path / ARGMAX_FILE).exists()


# The run


@pytest.mark.parametrize("variant", ["graph", "argmax"])
def test_the_first_token_and_the_rest_take_no_longer_than_the_run(folder: Path, tmp_path: Path, variant: str) -> None:
    side = {"folder": str(folder), "variant": variant, "threads": 1}
    timed = start({**side, "argmax": str(write_argmax_model(folder, tmp_path))})["run"]
    before = time.perf_counter()
    found = timed(prompt=[1, 2, 3], new_tokens=5)
    took = time.perf_counter() - before
    assert found["tokens"] == 5
    assert min(found["first"], found["rest"]) > 0
    assert found["first"] + found["rest"] <= took


@pytest.mark.slow
def test_a_report_has_times_and_memory_of_every_side(asked: DecodeRequest) -> None:
    report = run(replace(asked, threads=(1, 2)))
    document = json.loads(json.dumps(report.as_dict()))
    assert [found["threads"] for found in document["runs"]] == [1, 2]
    for found in document["runs"]:
        assert found["reference"] == "topw-graph"
        assert list(found["sides"]) == ["topw-graph", "argmax"]
        for side in found["sides"].values():
            assert [one["tokens"] for one in side["runs"]] == [4, 4]
            assert side["seconds_per_token"]["median"] == pytest.approx(
                np.median([r["rest"] / 3 for r in side["runs"]])
            )
            assert min(side["load_seconds"], *(one["first"] for one in side["runs"])) > 0
            assert side["peak_bytes"] > 1 << 20
        assert found["sides"]["topw-graph"]["ratio"]["median"] == 1.0
    text = report.text()
    assert "2 threads; the ratio is to TopWModel, graph" in text
    assert "| same graph, ArgMax" in text
    assert not list(asked.folder.parent.glob(".topw-bench-*"))


@pytest.mark.slow
@pytest.mark.skipif(library_path() is None, reason="no native library was built")
def test_the_native_sampler_is_a_side_of_its_own(bench: Callable[..., Result], folder: Path, tmp_path: Path) -> None:
    done = bench("decode", folder, "--prompt-tokens", 4, "--new-tokens", 3, "--rounds", 1, "--peers", "topw", "--plot",
                 tmp_path / "out.png")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "| TopWModel, native" in done.stdout
    assert "| TopWModel, graph" in done.stdout
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


# Sides


def names(request: DecodeRequest) -> list[str]:
    return [side.name for side in choose([*sides(request)], request.peers, ("genai", "transformers"))[0]]


def test_peers_without_a_folder_are_named_with_what_to_give(asked: DecodeRequest) -> None:
    reasons = {side.name: side.why_not for side in sides(asked)}
    assert reasons["topw-graph"] is reasons["argmax"] is None
    assert "--transformers MODEL_DIR" in str(reasons["transformers-greedy"])
    assert "optimum-cli export onnx" in str(reasons["optimum-greedy"])
    assert "onnxruntime_genai.models.builder" in str(reasons["genai-top-p"])


def test_a_peer_with_its_own_interpreter_needs_nothing_installed_here(asked: DecodeRequest, tmp_path: Path) -> None:
    there = replace(asked, peers=("genai",), genai=tmp_path, genai_python=tmp_path / "python")
    assert names(there) == ["genai-greedy", "genai-top-p", "genai-top-k"]
    assert {side.python for side in sides(there) if side.name.startswith("genai")} == {tmp_path / "python"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"peers": ("transformers",)},
            BenchmarkError,
            "transformers-greedy was requested, but is without a model",
        ),
        ({"peers": ("vllm",)}, ParameterError, "'vllm' is not a side of this benchmark; choose from topw-native, "),
        ({"optimum": Path()}, BenchmarkError, "is given, but optimum-onnx is not installed: pip install optimum-onnx"),
        ({"authors": Path("x.py")}, ParameterError, "give the model's folder with --transformers"),
        ({"prompt_tokens": 90, "new_tokens": 10}, ParameterError, r"90 \+ 10 tokens are 100, but the context has 96"),
        ({"folder": Path("nowhere")}, ManifestError, "nowhere"),
    ],
)
def test_a_request_that_cannot_run_is_refused(
    asked: DecodeRequest,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(install, "is_importable", lambda module: not module.startswith("optim"))
    with pytest.raises(error, match=message):
        run(replace(asked, **changes))


def test_every_sampling_search_sets_top_k(asked: DecodeRequest, tmp_path: Path) -> None:
    given = replace(asked, peers=(), genai=tmp_path, genai_python=tmp_path, transformers=tmp_path,
                    optimum=tmp_path, optimum_python=tmp_path, authors=tmp_path)  # fmt: skip
    searches = [side.settings["search"] for side in sides(given) if "search" in side.settings]
    assert len(searches) == 9
    assert all("top_k" in search for search in searches if search["do_sample"])


@pytest.mark.slow
def test_a_wrong_authors_file_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Other: ...\n")
    (tmp_path / "broken.py").write_text("import nothing_that_is_there\n")
    (tmp_path / "mine.txt").write_text("class TopW_LogitsProcessor: ...\n")
    for name, message in {
        "mine.py": "has no TopW_LogitsProcessor; give the authors' logit_processor_w1.py.",
        "broken.py": "does not load (ModuleNotFoundError",
        "mine.txt": "is not a Python file; give the path of the authors' logit_processor_w1.py.",
    }.items():
        settings = {"library": "transformers", "folder": "nowhere", "processor": str(tmp_path / name), "threads": 1}
        with pytest.raises(BenchmarkError) as found:
            Worker("transformers, authors' processor", FOLDER / "generate.py", settings)
        assert str(found.value).startswith(f"{tmp_path / name} {message}")


@pytest.mark.parametrize("arguments", [("--rounds", 0), ("--threads", 0), ("--threads", "1,2000"), ("--new-tokens", 1)])
def test_a_number_out_of_range_is_a_usage_error(bench: Callable[..., Result], folder: Path, arguments: Any) -> None:
    done = bench("decode", folder, *arguments)
    assert done.exit_code == 2
    assert "is not in the range" in done.stderr
