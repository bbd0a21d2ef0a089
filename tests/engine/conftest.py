"""Engines over toy models, whose float32 logits have the same bits in every batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.samples import slow
from tests.support.toy_model import Toy, export
from tests.support.waiting import HANG, set_when
from topw_deploy.engine import Engine, Request
from topw_deploy.engine.batch import Batch
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import TopWOptions

FORMS = {
    "grouped": {"form": "grouped"},
    "scatter": {"form": "scatter"},
    "growing": {"form": "scatter", "buffer_step": 16},
}

NewEngine = Callable[..., Engine]
"""The fixture `engine_of`: (model, **options) -> an engine that is shut down after the test."""


HOT: dict[str, Any] = {"temperature": 2.5, "lam": 0.2, "ignore_eos": True}
"""Parameters with which draws vary, and requests use all their new tokens."""
SYSTEM = list(range(10, 40))
A_ROW = 2 * (8 + 16) * 4  # bytes of a token of the toy


def ask(engine: Engine | TopWModel, prompt: list[int], new: int = 5, **more: Any) -> Any:
    given = {"max_new_tokens": new, "seed": 3, **HOT, **more}
    return engine.submit(prompt, **given).result(60) if isinstance(engine, Engine) else engine.generate(prompt, **given)


class Gate:
    """A stopping criterion that holds the engine's thread at a token of a sequence until `opened` is set.

    after: number of tokens to let pass before.
    reached: set when the thread is held.
    """

    def __init__(self, after: int = 0) -> None:
        self.after = after
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, ids: np.ndarray) -> bool:
        self.after -= 1
        if self.after >= 0:
            return False
        self.reached.set()
        assert self.opened.wait(HANG)
        return False

    def hold(self, engine: Engine, prompt: Any, **given: Any) -> Request:
        """Submit a request, and wait until it is held."""
        request = engine.submit(prompt, stopping_criteria=self, **given)
        assert self.reached.wait(HANG)
        return request

    def open_at_message(self, engine: Engine) -> None:
        """Open the gate as soon as a caller posts to the engine's thread, which the gate holds."""
        assert self.reached.wait(HANG)
        inbox = engine._worker._inbox
        before = inbox.qsize()
        set_when(self.opened, lambda: inbox.qsize() > before)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))


@pytest.fixture(scope="session", params=["grouped", "scatter", slow("growing")])
def any_model(request: pytest.FixtureRequest, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> TopWModel:
    """Models with caches over GroupQueryAttention and TensorScatter, of fixed and of growing length."""
    folder = export(tmp_path_factory.mktemp("toy") / request.param, toy, with_mass=True, **FORMS[request.param])
    return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)


@pytest.fixture(scope="session")
def model(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> TopWModel:
    folder = export(tmp_path_factory.mktemp("toy") / "export", toy, form="grouped")
    return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., TopWModel]:
    """Exports a toy model, with the form `grouped` unless the settings say otherwise, and opens it."""

    def open_toy(toy: Toy, **settings: Any) -> TopWModel:
        folder = export(tmp_path / f"toy{len(list(tmp_path.iterdir()))}", toy, **{"form": "grouped", **settings})
        return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)

    return open_toy


@pytest.fixture
def engine_of() -> Iterator[NewEngine]:
    engines: list[Engine] = []

    def new_engine(model: TopWModel, **options: Any) -> Engine:
        engines.append(Engine(model, **options))
        return engines[-1]

    yield new_engine
    for engine in engines:
        ending = threading.Thread(target=engine.shutdown, daemon=True)
        ending.start()
        ending.join(HANG)
        assert not ending.is_alive(), "the engine does not shut down"


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(start, end) of each chunk that the engine reads."""
    found: list[tuple[int, int]] = []
    read = Batch.read

    def record_chunk(batch: Batch, row: int, request: Any, start: int, end: int) -> int | None:
        found.append((start, end))
        return read(batch, row, request, start, end)

    monkeypatch.setattr(Batch, "read", record_chunk)
    return found
