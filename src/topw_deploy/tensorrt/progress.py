"""Progress of a build as one percentage, from TensorRT's phases, which nest and run on several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from topw_deploy.progress import Advance


class Phases:
    """The progress of nested phases. Any thread may report it.

    advance: called with the number of whole percents gained.
    stopped: the first exception of `advance`. It cancels the build. The caller raises it after the build, because no
        exception may pass through TensorRT.
    """

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._lock = threading.Lock()
        self._phases: dict[str, tuple[str | None, int, int]] = {}  # name -> parent, steps, steps done
        self._shown = 0
        self.stopped: BaseException | None = None

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Start a phase within the parent's current step."""
        with self._locked():
            self._phases[name] = (parent, max(1, steps), 0)

    def step(self, name: str, step: int) -> bool:
        """Complete a step. Returns whether the build may continue."""
        with self._locked():
            if name in self._phases:
                parent, steps, _ = self._phases[name]
                self._phases[name] = (parent, steps, step + 1)
            self._show()
        return self.stopped is None

    def finish(self, name: str) -> None:
        """End a phase, possibly before its last step."""
        with self._locked():
            if name in self._phases:
                parent, steps, _ = self._phases[name]
                self._phases[name] = (parent, steps, steps)
                self._show()
                del self._phases[name]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except BaseException as error:  # noqa: BLE001
            self.stopped = self.stopped or error

    def _show(self) -> None:
        roots = [name for name, (parent, _, _) in self._phases.items() if parent not in self._phases]
        percent = int(100 * max((self._share(name) for name in roots), default=0.0))
        if percent > self._shown:
            gained, self._shown = percent - self._shown, percent
            self._advance(gained)

    def _share(self, name: str) -> float:
        _, steps, done = self._phases[name]
        within = max((self._share(n) for n, (parent, _, _) in self._phases.items() if parent == name), default=0.0)
        return min(1.0, (done + (within if done < steps else 0.0)) / steps)


def new_monitor(trt: Any, phases: Phases) -> Any:
    """A tensorrt.IProgressMonitor that reports to `phases`."""

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
