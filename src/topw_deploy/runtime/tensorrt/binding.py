"""The inputs and outputs of a generation on an engine, see runtime/protocols.py.

What crosses between host and device in a step: the arrays that change, in one copy, and the results, in another, both
through pinned memory and, from the third step of a shape on, inside a CUDA graph together with the engine's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from topw_deploy.errors import GenerationError
from topw_deploy.runtime.tensorrt.context import Context, Copies
from topw_deploy.runtime.tensorrt.lane import Lane
from topw_deploy.runtime.tensorrt.layout import Layout

if TYPE_CHECKING:
    from topw_deploy.runtime.tensorrt.session import EngineSession


@dataclass(frozen=True)
class _Plan:
    """A run's shapes made definite. changing, results: (the caller's array, its place in pinned memory)."""

    layout: Layout
    context: Context
    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]
    copies: Copies
    changing: list[tuple[np.ndarray, np.ndarray]]
    results: list[tuple[np.ndarray, np.ndarray]]
    repeated: bool

    def holds(self, lane: Lane, repeated: bool) -> bool:
        """Whether the lane's memory is still where it was, and the run of the same kind."""
        where = self.copies.host, self.copies.device
        return where == (lane.host.pointer, lane.device.pointer) and self.repeated == repeated


class EngineBinding:
    """Host arrays are copied to the device when a run needs them there: those of `bind_changing` for every run, others
    once after they were bound or refreshed."""

    def __init__(self, session: EngineSession, lane: Lane, *, owns: bool) -> None:
        self._session, self._lane, self._owns = session, lane, owns
        self._arrays: dict[str, np.ndarray] = {}
        self._changing: set[str] = set()
        self._stale: set[str] = set()  # inputs whose arrays the device has not seen
        self._results: dict[str, np.ndarray] = {}
        self._memory: dict[str, tuple[tuple[int, ...], int]] = {}  # caches: shape and address
        self._plan: _Plan | None = None
        self._closed = False

    def bind_array(self, name: str, array: np.ndarray) -> None:
        known = self._arrays.get(name)
        if known is None or known.shape != array.shape or name in self._changing:
            self._plan = None
        self._changing.discard(name)
        self._arrays[name] = array
        self._stale.add(name)

    def bind_changing(self, name: str, array: np.ndarray) -> None:
        self._plan = None
        self._arrays[name] = array
        self._changing.add(name)

    def bind_on_host(self, name: str, array: np.ndarray) -> None:
        """No engine reads an input on the host: those operators are onnxruntime's."""
        self.bind_array(name, array)

    def refresh(self, name: str) -> None:
        self._stale.add(name)

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        """TensorRT updates a cache in place: past and present have one address."""
        self._plan = None
        self._memory[source] = self._memory[target] = (tuple(shape), pointer)

    def bind_result(self, name: str, array: np.ndarray) -> None:
        self._plan = None
        self._results[name] = array

    def another(self) -> EngineBinding:
        return EngineBinding(self._session, self._lane, owns=False)

    def close(self) -> None:
        """Give the lane back, unless CUDA fails on it; an interrupted run is waited for."""
        if self._owns and not self._closed:
            self._closed = True
            with suppress(GenerationError):
                self._session.cuda.use()
                self._lane.stream.wait()
                self._session.give_back(self._lane)

    def run(self, step: int | None = None) -> None:
        try:
            with self._session.cuda.turns.using:
                plan = self._compute(repeated=bool(step))  # step 0 is the last piece of the prompts
        except GenerationError as error:
            self._lane.loaded = None
            where = "in the prompt" if step is None else f"at step {step}"
            raise GenerationError(f"the engine failed {where}: {error}") from None
        for array, pinned in plan.results:
            array[...] = pinned

    def _compute(self, *, repeated: bool) -> _Plan:
        lane = self._lane
        self._session.cuda.use()
        plan = self._plan
        if plan is None or not plan.holds(lane, repeated):
            plan = self._plan = self._new_plan(repeated)
        if lane.loaded is not plan:
            plan.context.set(plan.shapes, plan.addresses)
            lane.loaded = plan
            self._stale.update(self._arrays)
        if self._stale:
            self._copy_stale(plan)
        for array, pinned in plan.changing:
            pinned[...] = array
        plan.context.run(plan.copies, repeated=repeated)
        lane.stream.wait()
        return plan

    def _copy_stale(self, plan: _Plan) -> None:
        """Copy what was bound or refreshed, unless every run copies it."""
        lane = self._lane
        for name in self._stale - self._changing:
            span = plan.layout.inputs[name]
            _view(lane.host.array, span.start, self._arrays[name])[...] = self._arrays[name]
            if span.size:
                lane.stream.copy_in(lane.device.pointer + span.start, lane.host.pointer + span.start, span.size)
        self._stale.clear()

    def _new_plan(self, repeated: bool) -> _Plan:
        session, lane = self._session, self._lane
        ids, edits = self._arrays["input_ids"], self._arrays["edit_ids"]
        batch, sequence = ids.shape
        profile = session.profile_for(batch, sequence, edits.shape[1])
        unread = {name: size for name, size in session.output_bytes(batch).items() if name not in self._results}
        layout = Layout(self._changing, self._arrays, self._results, unread)
        lane.reserve(layout)
        device, host = lane.device.pointer, lane.host
        addresses = {name: device + span.start for name, span in (layout.inputs | layout.outputs).items()}
        addresses |= {name: pointer for name, (_, pointer) in self._memory.items()}
        shapes = {name: array.shape for name, array in self._arrays.items()}
        shapes |= {name: shape for name, (shape, _) in self._memory.items() if name in session.inputs}
        there = session.tensors
        return _Plan(
            layout=layout,
            context=lane.context(profile, repeated=repeated),
            shapes={name: shape for name, shape in shapes.items() if name in there},
            addresses={name: at for name, at in addresses.items() if name in there},
            copies=Copies(host.pointer, device, layout.changing, layout.results),
            changing=[
                (array, _view(host.array, layout.inputs[name].start, array))
                for name, array in self._arrays.items()
                if name in self._changing
            ],
            results=[
                (array, _view(host.array, layout.outputs[name].start, array)) for name, array in self._results.items()
            ],
            repeated=repeated,
        )


def _view(memory: np.ndarray, start: int, like: np.ndarray) -> np.ndarray:
    """The bytes from `start` on as an array of the shape and type of `like`."""
    view: Any = memory[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
    return view
