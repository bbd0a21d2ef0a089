"""Copies to and from a device, and steps captured into CUDA graphs.

Uses onnxruntime's CPU provider and doubles of device memory and capture. Replays use the addresses and shapes bound at
capture.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.support.toy_model import Toy, export
from tests.support.waiting import HANG
from topw_deploy import device_lock
from topw_deploy.device_lock import DeviceLock
from topw_deploy.errors import GenerationError
from topw_deploy.manifest import DecoderManifest, ModelFolder
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort import device
from topw_deploy.runtime.ort.device import Area, BufferPool, DeviceMemory, RunThread
from topw_deploy.runtime.ort.graph_session import GraphSession
from topw_deploy.runtime.session import SessionOptions
from topw_deploy.sampling import TopWOptions

TOY = Toy.random(5, options=TopWOptions(top_m=64, metric="mahalanobis"))
SETTINGS: dict[str, Any] = {"temperature": 1.5, "lam": 0.3, "ignore_eos": True}


class FarArea(Area):
    """Device memory not shared with the host array."""

    uploads = 0

    def __init__(self, size: int, device: tuple[str, int]) -> None:
        self.size, self.host, self._device = size, np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        self.pointer = self._device.ctypes.data

    def upload(self) -> None:
        FarArea.uploads += 1
        self._device[:] = self.host

    def download(self) -> None:
        self.host[:] = self._device


class Bound:
    """onnxruntime's IO binding with a record of its bindings."""

    def __init__(self, session: Any) -> None:
        self.real = REAL(session.real)
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.places: dict[str, tuple[Any, ...]] = {}
        self.get_outputs = self.real.get_outputs
        self.bind_ortvalue_input = self.real.bind_ortvalue_input

    def bind_input(self, name: str, *place: Any) -> None:
        self.inputs[name] = place
        self.real.bind_input(name, *place)

    def bind_output(self, name: str, *place: Any) -> None:
        self.places[name] = place
        self.real.bind_output(name, *place)


class Capturing:
    """An onnxruntime session that captures runs with a graph number once and then replays them."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.graphs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.eager = self.replays = 0

    def run_with_iobinding(self, io: Bound, options: Any) -> None:
        number = "-1" if options is None else options.get_run_config_entry("gpu_graph_id")
        if number == "-1":
            self.eager += 1
            self.real.run_with_iobinding(io.real, None)
        elif number not in self.graphs:
            self.graphs[number] = dict(io.inputs), dict(io.places)
            for _ in range(2):  # allocate, capture
                self.real.run_with_iobinding(io.real, None)
        else:
            self.replays += 1
            again, (inputs, places) = REAL(self.real), self.graphs[number]
            for name, place in inputs.items():
                again.bind_input(name, *place)
            for name, place in places.items():
                again.bind_output(name, *place)
            self.real.run_with_iobinding(again, None)


REAL = ort.SessionIOBinding
Open = Callable[..., tuple[TopWModel, Capturing]]


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Open a folder with the doubles. graphs: capture steps."""
    monkeypatch.setattr(ort, "SessionIOBinding", lambda raw: (Bound if isinstance(raw, Capturing) else REAL)(raw))
    monkeypatch.setattr(device, "Area", FarArea)

    def open_(path: Path, *, graphs: bool) -> tuple[TopWModel, Capturing]:
        folder = ModelFolder(path, DecoderManifest)
        session = GraphSession(folder, SessionOptions(provider="cpu", intra_op_num_threads=1))
        capturing = Capturing(session.raw._sess)
        session.raw = SimpleNamespace(_sess=capturing)
        session._buffers = BufferPool(("cpu", 0), graphs=graphs)
        return TopWModel(folder, session, time.perf_counter()), capturing

    return open_


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every form of cache (toy_graph.py); buffers of `stepped` grow by 16 tokens."""
    root = tmp_path_factory.mktemp("toys")
    found = {form: export(root / form, TOY, form=form, with_mass=True) for form in ("concat", "grouped", "shared")}
    return {**found, "stepped": export(root / "stepped", TOY, form="scatter", buffer_step=16, with_mass=True)}


def on_the_host(path: Path) -> TopWModel:
    return TopWModel.from_pretrained(path, provider="cpu", intra_op_num_threads=1)


@pytest.mark.parametrize("form", ["concat", "grouped", "stepped", "shared"])
def test_tokens_on_a_device_equal_those_on_the_host(folders: dict[str, Path], on_a_device: Open, form: str) -> None:
    prompts = ["one", "two"] if form == "shared" else ["a longer prompt", "one", "two of them"]
    expected = on_the_host(folders[form]).generate(prompts, seed=4, max_new_tokens=30, **SETTINGS)
    model, session = on_a_device(folders[form], graphs=False)
    found = model.generate(prompts, seed=4, max_new_tokens=30, **SETTINGS)
    for there, here in zip(found, expected, strict=True):
        assert (there.token_ids, there.kept, there.certified) == (here.token_ids, here.kept, here.certified)
        assert (there.logprobs, there.mass) == (here.logprobs, here.mass)
    assert session.graphs == {}


def requests() -> list[dict[str, Any]]:
    """Rows with different ends, growing edits and different parameters."""
    return [
        {"prompt": ["first", "and a second one"], "seed": 1, "max_new_tokens": [30, 9], "repetition_penalty": 1.3},
        {"prompt": "alone", "seed": 2, "max_new_tokens": 40, "no_repeat_ngram_size": 2},
        {"prompt": ["x" * 40, "y"], "seed": [3, 4], "max_new_tokens": 20, "lam": [0.1, 2.2]},
    ]


@pytest.mark.parametrize("form", ["grouped", "stepped"])
def test_tokens_of_replayed_steps_equal_those_on_the_host(
    folders: dict[str, Path], on_a_device: Open, form: str
) -> None:
    host = on_the_host(folders[form])
    model, session = on_a_device(folders[form], graphs=True)
    for request in [*requests(), *requests()]:
        settings = {**SETTINGS, **request}
        there, here = model.generate(**settings), host.generate(**settings)
        pairs = zip(there, here, strict=True) if isinstance(there, list) else [(there, here)]
        for found, expected in pairs:
            assert found.token_ids == expected.token_ids
    assert session.replays > 100


def test_a_graph_is_captured_once_for_a_shape_and_serves_the_next_generation(
    folders: dict[str, Path], on_a_device: Open
) -> None:
    model, session = on_a_device(folders["grouped"], graphs=True)
    for count, prompts in enumerate((["ab", "cd"], ["of another length", "x"], ["and", "more"])):
        model.generate(prompts, seed=count, max_new_tokens=11, **SETTINGS)
        assert (len(session.graphs), session.eager) == (1, count + 1)  # prompts are not captured
        assert session.replays == 9 + 10 * count  # the prompt draws first
    model.generate("one row", seed=0, max_new_tokens=3, **SETTINGS)
    assert len(session.graphs) == 2


def test_a_buffer_that_grows_is_captured_again(folders: dict[str, Path], on_a_device: Open) -> None:
    model, session = on_a_device(folders["stepped"], graphs=True)
    model.generate("abcd", seed=0, max_new_tokens=40, **SETTINGS)
    assert len(session.graphs) == 3  # 16, 32 and 48 tokens


def test_there_are_only_so_many_graphs(
    folders: dict[str, Path], on_a_device: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_MOST_GRAPHS", 2)
    model, session = on_a_device(folders["stepped"], graphs=True)
    expected = on_the_host(folders["stepped"]).generate("abcd", seed=0, max_new_tokens=40, **SETTINGS)
    assert model.generate("abcd", seed=0, max_new_tokens=40, **SETTINGS).token_ids == expected.token_ids
    assert len(session.graphs) == 2
    assert session.eager > 5


def test_a_step_copies_only_what_it_changes(folders: dict[str, Path], on_a_device: Open) -> None:
    model, _ = on_a_device(folders["grouped"], graphs=False)
    before = FarArea.uploads
    model.generate("abcd", seed=0, max_new_tokens=20, **SETTINGS)
    assert FarArea.uploads - before == 2 + 2 + 18  # all in two runs, then changes
    before = FarArea.uploads
    model.generate("abcd", seed=0, max_new_tokens=20, repetition_penalty=1.2, **SETTINGS)
    assert FarArea.uploads - before == 2 * 20


def test_generations_at_the_same_time_have_memory_of_their_own(folders: dict[str, Path], on_a_device: Open) -> None:
    host = on_the_host(folders["grouped"])
    expected = [host.generate(f"prompt {n}", seed=n, max_new_tokens=30, **SETTINGS).token_ids for n in range(3)]
    model, _ = on_a_device(folders["grouped"], graphs=True)
    streams = [model.stream(f"prompt {n}", seed=n, max_new_tokens=30, **SETTINGS) for n in range(3)]
    found: dict[int, list[int]] = {}
    while len(found) < 3:  # one piece each in turn
        for n, stream in enumerate(streams):
            piece = next(stream, None)
            if piece is not None and piece.result is not None:
                found[n] = piece.result.token_ids
    assert [found[n] for n in range(3)] == expected

    def work(n: int) -> None:
        found[n] = model.generate(f"prompt {n}", seed=n, max_new_tokens=30, **SETTINGS).token_ids

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(3)] == expected


def test_memory_grows_for_a_long_prompt_and_is_used_again(folders: dict[str, Path], on_a_device: Open) -> None:
    host = on_the_host(folders["grouped"])
    model, session = on_a_device(folders["grouped"], graphs=True)
    pool = model._session._buffers  # type: ignore[union-attr]
    pool._free.append(lent := device.StepBuffers(("cpu", 0)))
    lent.areas["rest"] = FarArea(256, ("cpu", 0))  # too small for ids and parameters
    for text in ("z" * 40, "short"):
        expected = host.generate(text, seed=1, max_new_tokens=8, **SETTINGS)
        assert model.generate(text, seed=1, max_new_tokens=8, **SETTINGS).token_ids == expected.token_ids
    assert lent.areas["rest"].size > 256
    assert pool._free == [lent]
    assert len(session.graphs) == 1


def test_a_failed_run_says_where_and_gives_its_memory_back(folders: dict[str, Path], on_a_device: Open) -> None:
    model, session = on_a_device(folders["grouped"], graphs=True)

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA failure 700: an illegal memory access")

    session.run_with_iobinding = fail  # type: ignore[method-assign]
    with pytest.raises(GenerationError, match="onnxruntime failed at step 0: CUDA failure 700"):
        model.generate("abcd", max_new_tokens=20)
    assert len(model._session._buffers._free) == 1  # type: ignore[union-attr]


def test_garbage_collection_may_close_a_generation_while_a_graph_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, made = BufferPool(("cpu", 0), graphs=True), device._new_run_options
    buffers = pool.borrow()

    def collecting(graph: str) -> ort.RunOptions:
        pool.give_back(buffers)
        return made(graph)

    monkeypatch.setattr(device, "_new_run_options", collecting)
    thread = threading.Thread(target=pool.graph, args=("a step",), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert pool.borrow() is buffers


class Logged(DeviceLock):
    """Logs calls to DeviceLock."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def enter(self) -> None:
        self.log.append("in")
        super().enter()

    def leave(self) -> None:
        super().leave()
        self.log.append("out")

    @contextmanager
    def capturing(self) -> Iterator[bool]:
        with super().capturing() as alone:
            self.log.append(f"captures {alone}")
            yield alone


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls to the device lock."""
    asked: list[str] = []
    monkeypatch.setitem(device_lock._locks, ("cpu", 0), Logged(asked))
    return asked


def test_every_use_of_the_device_holds_its_lock(folders: dict[str, Path], on_a_device: Open, log: list[str]) -> None:
    model, _ = on_a_device(folders["grouped"], graphs=True)
    memory = DeviceMemory(64, ("cpu", 0))
    memory.change(lambda _: log.append("changes"))
    memory.clear(64)
    model._session._buffers.borrow()  # type: ignore[union-attr]
    assert log == ["in", "out", "in", "changes", "out", "in", "out", "in", "out"]
    log.clear()
    model.generate("abc", seed=0, max_new_tokens=4, **SETTINGS)
    # buffers, cache, prompt; a step's upload and capture; two replays
    assert log == ["in", "out"] * 4 + ["captures True"] + ["in", "out"] * 2


def test_a_step_is_not_captured_while_another_model_is_being_opened(
    folders: dict[str, Path], on_a_device: Open, log: list[str]
) -> None:
    model, session = on_a_device(folders["grouped"], graphs=True)
    expected = on_the_host(folders["grouped"]).generate("abc", seed=0, max_new_tokens=4, **SETTINGS)
    with device_lock.device_lock(("cpu", 0)).opening():
        found = model.generate("abc", seed=0, max_new_tokens=4, **SETTINGS)
    assert found.token_ids == expected.token_ids
    assert log.count("captures False") == 3
    assert (session.graphs, session.eager) == ({}, 4)
    model.generate("abc", seed=0, max_new_tokens=4, **SETTINGS)
    assert (len(session.graphs), session.replays) == (1, 2)


def test_a_step_whose_capture_failed_is_captured_another_time(folders: dict[str, Path], on_a_device: Open) -> None:
    model, session = on_a_device(folders["grouped"], graphs=True)
    run, calls = session.run_with_iobinding, iter(range(1000))

    def fail_once(io: Bound, options: Any) -> None:
        if next(calls) == 1:
            raise RuntimeError("CUDA failure 901: operation failed due to a previous error during capture")
        run(io, options)

    session.run_with_iobinding = fail_once  # type: ignore[method-assign]
    with pytest.raises(GenerationError, match="failed at step 1: CUDA failure 901"):
        model.generate("abc", seed=0, max_new_tokens=4, **SETTINGS)
    (graph,) = model._session._buffers._graphs.values()  # type: ignore[union-attr]
    assert not graph.captured
    model.generate("abc", seed=0, max_new_tokens=4, **SETTINGS)
    assert graph.captured


@pytest.mark.parametrize("graphs", [True, False])
def test_a_session_with_graphs_runs_on_one_thread_whoever_calls(
    folders: dict[str, Path], on_a_device: Open, graphs: bool
) -> None:
    model, session = on_a_device(folders["grouped"], graphs=graphs)
    run, threads = session.run_with_iobinding, set()

    def noted(io: Bound, options: Any) -> None:
        threads.add(threading.get_ident())
        run(io, options)

    session.run_with_iobinding = noted  # type: ignore[method-assign]
    callers = [
        threading.Thread(target=lambda: model.generate("abc", seed=0, max_new_tokens=4, **SETTINGS)) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
        caller.join()
    model.generate("abc", seed=0, max_new_tokens=4, **SETTINGS)
    assert len(session.graphs) == graphs
    assert (len(threads) == 1) == graphs
    assert (threading.get_ident() in threads) != graphs


def test_a_session_is_closed_under_the_lock(folders: dict[str, Path], on_a_device: Open, log: list[str]) -> None:
    model = on_a_device(folders["grouped"], graphs=True)[0]
    model.generate("abc", seed=0, max_new_tokens=4, **SETTINGS)
    weakref.finalize(model._session.raw._sess, log.append, "closed")  # type: ignore[union-attr]
    log.clear()
    model.close()  # immediately, not at garbage collection
    assert log == ["in", "closed", "out"]


def test_an_interrupted_caller_waits_until_its_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, ended, waits_again = RunThread(), list[str](), threading.Event()

    def interrupt(future: object) -> None:
        raise KeyboardInterrupt

    def wait_again(futures: list[Future[None]]) -> None:
        waits_again.set()
        wait(futures)

    monkeypatch.setattr(Future, "result", interrupt)
    monkeypatch.setattr(device, "wait", wait_again)

    def work() -> None:
        assert waits_again.wait(HANG)
        ended.append("work")

    with pytest.raises(KeyboardInterrupt):
        runner.call(work)
    assert ended == ["work"]
