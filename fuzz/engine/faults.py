"""Make runs of the model fail in an engine's thread. Runs in other threads, of `TopWModel.generate`, never fail."""

from __future__ import annotations

import random
import threading
import time

from topw_deploy.errors import GenerationError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort.session import HostBinding, OrtSession

MESSAGE = "injected"
_ENGINE_THREAD = "topw-engine"


class Faults:
    """Decides which runs fail or are slow.

    rate: share of the runs that fail, half of them after they have changed the caches.
    slow: share of the runs that take a few milliseconds longer.
    surprise: whether the next run raises an error that the engine does not expect, once.
    injected: number of failed runs so far.
    """

    def __init__(self, seed: int) -> None:
        self.rate = self.slow = 0.0
        self.surprise = False
        self.injected = 0
        self._random = random.Random(seed)

    @classmethod
    def of(cls, model: TopWModel, seed: int) -> Faults:
        """Faults for all bindings that `model` makes from now on."""
        session, _ = model._require_open()
        faults = cls(seed)
        session.bind = lambda: FaultyBinding(session, faults)  # type: ignore[method-assign,arg-type,return-value]
        return faults

    def before(self) -> None:
        if self.surprise:
            self.surprise = False
            raise RuntimeError(f"{MESSAGE} surprise")
        if self._random.random() < self.slow:
            time.sleep(self._random.random() * 0.004)
        self._fail()

    def after(self) -> None:
        self._fail()

    def _fail(self) -> None:
        if self._random.random() < self.rate / 2:
            self.injected += 1
            raise GenerationError(f"onnxruntime failed: {MESSAGE}")


class FaultyBinding(HostBinding):
    """A binding whose runs in an engine's thread fail as `faults` decides."""

    def __init__(self, session: OrtSession, faults: Faults) -> None:
        super().__init__(session)
        self._faults = faults

    def new_sibling(self) -> FaultyBinding:
        return FaultyBinding(self._session, self._faults)

    def run(self, step: int | None = None) -> None:
        if threading.current_thread().name != _ENGINE_THREAD:
            super().run(step)
            return
        self._faults.before()
        super().run(step)
        self._faults.after()
