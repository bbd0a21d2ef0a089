"""How far a build is: TensorRT's progress monitor, whose phases lie in one another, as one growing number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Phases:
    """What `IProgressMonitor` is told, from any thread. `tell` is called with whole percents gained.

    `stopped` is what went wrong while telling (an interrupt, a closed terminal): the build is then to be cancelled,
    as no exception may pass through TensorRT, and raised by whoever started it.
    """

    def __init__(self, tell: Callable[[int], object]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._phases: dict[str, tuple[str | None, int, int]] = {}  # name -> parent, steps, steps done
        self._told = 0
        self.stopped: BaseException | None = None

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Phase `name` of so many steps begins, as a part of the parent's current step."""
        with self._held():
            self._phases[name] = (parent, max(1, steps), 0)

    def step(self, name: str, step: int) -> bool:
        """Step number `step` of the phase is done. -> whether to go on."""
        with self._held():
            if name in self._phases:
                parent, steps, _ = self._phases[name]
                self._phases[name] = (parent, steps, step + 1)
            self._show()
        return self.stopped is None

    def finish(self, name: str) -> None:
        """The phase is over, perhaps before its last step."""
        with self._held():
            if name in self._phases:
                parent, steps, _ = self._phases[name]
                self._phases[name] = (parent, steps, steps)
                self._show()
                del self._phases[name]

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Alone among the threads; whatever is raised, an interrupt too, is kept in `stopped`."""
        try:
            with self._lock:
                yield
        except BaseException as error:  # noqa: BLE001
            self.stopped = self.stopped or error

    def _show(self) -> None:
        roots = [name for name, (parent, _, _) in self._phases.items() if parent not in self._phases]
        percent = int(100 * max((self._share(name) for name in roots), default=0.0))
        if percent > self._told:
            gained, self._told = percent - self._told, percent
            self._tell(gained)

    def _share(self, name: str) -> float:
        _, steps, done = self._phases[name]
        within = max((self._share(n) for n, (parent, _, _) in self._phases.items() if parent == name), default=0.0)
        return min(1.0, (done + (within if done < steps else 0.0)) / steps)


def monitor(trt: Any, phases: Phases) -> Any:
    """A tensorrt.IProgressMonitor that passes everything on to `phases`."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base is a value of the module
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return phases.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)

    return Monitor()
