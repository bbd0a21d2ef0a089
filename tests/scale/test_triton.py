"""Triton's model repository, and its model over a stand-in for the Python backend's module."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.toy_model import Toy, export
from tests.support.waiting import HANG, until
from topw_deploy.cli.serve import triton
from topw_deploy.errors import ExportError, ManifestError, ParameterError
from topw_deploy.manifest import Verification
from topw_deploy.runtime import TopWModel
from topw_deploy.triton.repository import OUTPUTS, configuration, write_repository

FINAL = 1
CPU = {"provider": "cpu", "intra_op_num_threads": 1}
HOT = {"temperature": 2.5, "lam": 0.2, "max_new_tokens": 12}


class Sender:
    """Collects responses.

    cancelled: the answer of `is_cancelled`.
    looks: number of calls of `is_cancelled`.
    """

    def __init__(self) -> None:
        self.responses: list[Any] = []
        self.ended = threading.Event()
        self.cancelled, self.looks = False, 0

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self.ended.is_set(), "a response after the last one"
        if response is not None:
            self.responses.append(response)
        if flags & FINAL:
            self.ended.set()

    def is_cancelled(self) -> bool:
        self.looks += 1
        return self.cancelled


class Request:
    """A request of Triton. inputs: arrays by name."""

    def __init__(self, **inputs: Any) -> None:
        self.inputs, self.sender = inputs, Sender()

    def get_response_sender(self) -> Sender:
        return self.sender

    def wait(self) -> list[Any]:
        assert self.sender.ended.wait(HANG)
        return self.sender.responses


def stand_in() -> ModuleType:
    """The parts of `triton_python_backend_utils` that the backend uses."""

    class TritonError:
        INTERNAL, INVALID_ARG, UNAVAILABLE = range(3)

        def __init__(self, message: str, code: int) -> None:
            self.text, self.code = message, code

    def tensor(name: str, values: np.ndarray) -> Any:
        assert isinstance(values, np.ndarray)
        return SimpleNamespace(name=name, as_numpy=lambda: values)

    def response(output_tensors: list[Any], error: Any = None) -> Any:
        return SimpleNamespace(outputs={each.name: each.as_numpy() for each in output_tensors}, error=error)

    module: Any = ModuleType("triton_python_backend_utils")
    module.TritonError, module.Tensor, module.InferenceResponse = TritonError, tensor, response
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    module.Logger = SimpleNamespace(log_error=lambda message: None)
    module.get_input_tensor_by_name = lambda request, name: (
        tensor(name, request.inputs[name]) if name in request.inputs else None
    )
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("triton") / "toy", Toy.random(3), form="grouped")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[TopWModel]:
    with TopWModel.from_pretrained(folder, **CPU) as model:
        yield model


@pytest.fixture(scope="module")
def backend(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The repository's own model.py, initialized."""
    place = tmp_path_factory.mktemp("repository")
    written = write_repository(folder, place, engine={"max_batch": 2, "max_queue": 1}, opening=CPU)
    text = configuration("toy", {"max_batch": 2, "max_queue": 1}, CPU)
    assert (written / "config.pbtxt").read_text() == text
    values = {key: {"string_value": value} for key, value in parameters_of(text).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", stand_in())
        patch.delitem(sys.modules, "topw_deploy.triton.backend", raising=False)
        spec = importlib.util.spec_from_file_location("model", written / "1" / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = module.TritonPythonModel()
        config = json.dumps({"parameters": values})
        found.initialize({"model_config": config, "model_repository": str(written), "model_version": "1"})
        yield found
        found.finalize()


def parameters_of(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith("parameters")]
    return {line.split('"')[1]: json.loads(line.split("string_value: ")[1].removesuffix(" } }")) for line in lines}


def request_of(text: str | None = "ab", **inputs: Any) -> Request:
    if text is not None:
        inputs["text_input"] = np.array([text.encode()], np.object_)
    given = inputs.pop("parameters", HOT)
    raw = given if isinstance(given, bytes) else json.dumps(given).encode()
    return Request(parameters=np.array([raw], np.object_), **inputs)


def run(backend: Any, *requests: Request) -> list[list[Any]]:
    backend.execute(requests)
    return [request.wait() for request in requests]


def test_an_answer_is_that_of_the_model_alone(backend: Any, model: TopWModel) -> None:
    wanted = model.generate("ab", seed=5, **HOT)
    ids = np.array(model.tokenizer.encode("ab"), np.int64)
    for request in (
        request_of(seed=np.array([5], np.uint64)),
        request_of(None, input_ids=ids, parameters={**HOT, "seed": 5}),
    ):
        (answer,) = run(backend, request)[0]
        assert answer.error is None
        assert answer.outputs["text_output"][0].decode() == wanted.text
        assert answer.outputs["token_ids"].tolist() == wanted.token_ids
        assert answer.outputs["finish_reason"][0].decode() == wanted.finish_reason
        assert answer.outputs["seed"].tolist() == [5]
        assert answer.outputs.keys() == {name for name, _, _ in OUTPUTS}


def test_a_stream_has_a_response_per_piece(backend: Any, model: TopWModel) -> None:
    answers = run(backend, request_of(stream=np.array([True]), parameters={**HOT, "seed": 6}))[0]
    wanted = model.generate("ab", seed=6, **HOT)
    assert len(answers) > 3
    assert "".join(each.outputs["text_output"][0].decode() for each in answers) == wanted.text
    assert [bool(each.outputs["finish_reason"][0]) for each in answers] == [False] * (len(answers) - 1) + [True]
    assert answers[-1].outputs["token_ids"].tolist() == wanted.token_ids


def test_requests_run_at_once_and_samples_have_indices(backend: Any, model: TopWModel) -> None:
    requests = [request_of("ab", seed=np.array([seed], np.uint64)) for seed in range(3)]
    for seed, (answer,) in enumerate(run(backend, *requests)):
        assert answer.outputs["text_output"][0].decode() == model.generate("ab", seed=seed, **HOT).text
    answers = run(backend, request_of(parameters={**HOT, "n": 2, "seed": 1}))[0]
    found = {int(each.outputs["index"][0]): each.outputs["token_ids"].tolist() for each in answers}
    samples = model.generate("ab", seed=1, num_return_sequences=2, **HOT)
    assert found == {index: each.token_ids for index, each in enumerate(samples)}


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        (request_of(None), 1, "either text_input or input_ids"),
        (request_of("a", input_ids=np.array([3])), 1, "either text_input or input_ids"),
        (request_of(parameters=b"{"), 1, "not valid JSON"),
        (request_of(parameters=b"[" * 100_000), 1, "not valid JSON"),
        (request_of(parameters=[1]), 1, "must be an object"),
        (request_of(parameters={"tempreature": 1}), 1, "'tempreature': did you mean temperature?"),
        (request_of(parameters={"max_tok": 1}), 1, "did you mean max_tokens?"),
        (request_of(parameters={"top_m": 1}), 1, "top_m is built into the graph"),
        (request_of(parameters={"streamer": "x"}), 1, "'streamer'"),
        (request_of(parameters={"temperature": -1}), 1, "temperature"),
        (request_of(parameters={"seed": 1}, seed=np.array([1], np.uint64)), 1, "seed is given twice"),
        (request_of(stream=np.array([True, False])), 1, "stream has 2 values"),
        (request_of("x" * 200), 1, "tokens"),
        (request_of(parameters={**HOT, "n": 9}), 1, ""),
    ],
)
def test_a_wrong_request_gets_an_error_and_an_end(backend: Any, request_: Request, code: int, says: str) -> None:
    (answer,) = run(backend, request_)[0]
    assert answer.error is not None
    assert answer.error.code == code
    assert says in answer.error.text


def test_a_cancelled_request_frees_its_row(backend: Any) -> None:
    request = request_of(parameters={**HOT, "max_new_tokens": 90})
    request.sender.cancelled = True
    assert run(backend, request)[0] == []
    assert run(backend, request_of())[0][0].error is None


def test_a_cancelled_request_ends_while_it_waits(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no piece yet, because no row was free."""
    waiting, freed = threading.Event(), threading.Event()

    async def stream(*_: Any, **__: Any) -> AsyncIterator[Any]:
        waiting.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            freed.set()

    monkeypatch.setattr(backend._engine, "stream", stream)
    request = request_of()
    backend.execute([request])
    assert waiting.wait(HANG)
    until(lambda: request.sender.looks >= 2)
    assert not request.sender.ended.is_set()
    request.sender.cancelled = True
    assert request.sender.ended.wait(HANG)
    assert request.sender.responses == []
    assert freed.is_set()


def test_the_options_that_open_a_model_reach_the_repository(folder: Path, tmp_path: Path) -> None:
    words = ["--threads", "1", "--sampler", "graph", "--allow-fallback", "--hard-link"]
    done = CliRunner().invoke(triton, [str(folder), str(tmp_path), "--name", "m", *words])
    assert done.exit_code == 0, done.output
    opening = json.loads(parameters_of((tmp_path / "m" / "config.pbtxt").read_text())["opening"])
    wanted = {"provider": "auto", "intra_op_num_threads": 1, "sampler": "graph", "allow_fallback": True}
    assert opening == wanted


def test_a_repository_is_written_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(triton, [str(folder), str(tmp_path), "--name", "m", "--hard-link"])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["1", "config.pbtxt"]
    copied = tmp_path / "m" / "1" / "export"
    assert {path.name for path in copied.iterdir()} == {path.name for path in folder.iterdir()}
    assert (copied / "model.onnx").stat().st_ino == (folder / "model.onnx").stat().st_ino
    with pytest.raises(ExportError, match="exists"):
        write_repository(folder, tmp_path, name="m")
    for name in ("../m", ".m", "m n"):
        with pytest.raises(ParameterError, match=r"must begin with a letter or digit and have only letters, digits, "):
            write_repository(folder, tmp_path, name=name)
    with pytest.raises(ManifestError):
        write_repository(tmp_path / "m", tmp_path, name="other")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.slow
def test_an_export_is_added_to_a_repository(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from topw_deploy import export
    from topw_deploy.cli import export as command_module

    for dry in (True, False):
        report = SimpleNamespace(
            output=folder, dry_run=dry, notices=(), model_type="", nodes=0, weight_bytes=0, inputs=(), outputs=(),
            states={}, sizes={}, memory={}, files=(), verification=Verification(status="skipped"),
        )  # fmt: skip
        monkeypatch.setattr(export, "export_model", lambda *_, report=report, **__: report)
        done = CliRunner().invoke(command_module.export, ["tiny", "out", "--triton", str(tmp_path / "models")])
        assert done.exit_code == 0, done.output
        assert (tmp_path / "models" / "toy" / "config.pbtxt").exists() is not dry
