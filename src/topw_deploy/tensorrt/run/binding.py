"""The inputs and outputs of one generation on an engine.

A step copies all changing inputs at once, and all results at once. Both copies use pinned memory and belong to the
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from topw_deploy.errors import GenerationError
from topw_deploy.tensorrt.run.context import Context, Copies
from topw_deploy.tensorrt.run.engine import TensorRTEngine
from topw_deploy.tensorrt.run.stream import EngineStream, MemoryLayout


@dataclass(frozen=True)
class _RunPlan:
    """The shapes and addresses of a run.

    changing: inputs that are copied for every run, each as (the caller's array, its pinned copy).
    results: outputs that the caller reads, in the same form.
    repeated: whether the run is a repeated step, which a CUDA graph may launch.
    """

    layout: MemoryLayout
    context: Context
    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]
    copies: Copies
    changing: list[tuple[np.ndarray, np.ndarray]]
    results: list[tuple[np.ndarray, np.ndarray]]
    repeated: bool

    def is_valid(self, stream: EngineStream, repeated: bool) -> bool:
        """Whether the plan is of the same kind of run, and the stream's memory has not moved since."""
        where = self.copies.host, self.copies.device
        return where == (stream.host.pointer, stream.device.pointer) and self.repeated == repeated


class TensorRTBinding:
    """Implements the runtime's binding protocol over an engine.

    Copies arrays of `bind_changing` for every run, and others once after they are bound or refreshed.

    owns: whether `close` returns the stream to the engine.
    """

    def __init__(self, engine: TensorRTEngine, stream: EngineStream, *, owns: bool = True) -> None:
        self._engine, self._stream, self._owns = engine, stream, owns
        self._arrays: dict[str, np.ndarray] = {}
        self._changing: set[str] = set()
        self._stale: set[str] = set()  # inputs not yet copied to the device
        self._results: dict[str, np.ndarray] = {}
        self._memory: dict[str, tuple[tuple[int, ...], int]] = {}  # name of a cache's tensor -> its shape and address
        self._inputs: set[str] = set()  # names of the caches that are inputs
        self._plan: _RunPlan | None = None
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
        """Bind an array as `bind_array` does. Only onnxruntime reads inputs on the host."""
        self.bind_array(name, array)

    def refresh(self, name: str) -> None:
        self._stale.add(name)

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        """Bind a cache's input `source` and output `target` to one address: TensorRT updates the cache in place."""
        self._plan = None
        self._memory[source] = self._memory[target] = (tuple(shape), pointer)
        self._inputs.add(source)

    def bind_result(self, name: str, array: np.ndarray) -> None:
        self._plan = None
        self._results[name] = array

    def new_sibling(self) -> TensorRTBinding:
        return TensorRTBinding(self._engine, self._stream, owns=False)

    def close(self) -> None:
        """Wait for an interrupted run, and return the stream to the engine unless CUDA fails on the stream."""
        if self._owns and not self._closed:
            self._closed = True
            with suppress(GenerationError):
                self._engine.cuda.use()
                self._stream.cuda_stream.wait()
                self._engine.return_stream(self._stream)

    def run(self, step: int | None = None) -> None:
        try:
            with self._engine.cuda.lock.shared_use:
                plan = self._compute(repeated=bool(step))  # step 0 runs the prompts' last chunk
        except GenerationError as error:
            self._stream.loaded = None
            where = "in the prompt" if step is None else f"at step {step}"
            raise GenerationError(f"the engine failed {where}: {error}") from None
        for array, pinned in plan.results:
            array[...] = pinned

    def _compute(self, *, repeated: bool) -> _RunPlan:
        stream = self._stream
        self._engine.cuda.use()
        plan = self._plan
        if plan is None or not plan.is_valid(stream, repeated):
            plan = self._plan = self._new_plan(repeated)
        if stream.loaded is not plan:
            plan.context.set_shapes(plan.shapes, plan.addresses)
            stream.loaded = plan
            self._stale.update(self._arrays)
        if self._stale:
            self._copy_stale(plan)
        for array, pinned in plan.changing:
            pinned[...] = array
        plan.context.run(plan.copies, repeated=repeated)
        stream.cuda_stream.wait()
        return plan

    def _copy_stale(self, plan: _RunPlan) -> None:
        stream = self._stream
        for name in self._stale - self._changing:
            span = plan.layout.inputs[name]
            _view_like(stream.host.array, span.start, self._arrays[name])[...] = self._arrays[name]
            if span.size:
                stream.cuda_stream.copy_to_device(
                    stream.device.pointer + span.start, stream.host.pointer + span.start, span.size
                )
        self._stale.clear()

    def _new_plan(self, repeated: bool) -> _RunPlan:
        engine, stream = self._engine, self._stream
        ids, edits = self._arrays["input_ids"], self._arrays["edit_ids"]
        batch, sequence = ids.shape
        profile = engine.profile_for(batch, sequence, edits.shape[1])
        unread = {name: size for name, size in engine.output_bytes(batch).items() if name not in self._results}
        layout = MemoryLayout(self._changing, self._arrays, self._results, unread)
        stream.reserve(layout)
        device, host = stream.device.pointer, stream.host
        addresses = {name: device + span.start for name, span in (layout.inputs | layout.outputs).items()}
        addresses |= {name: pointer for name, (_, pointer) in self._memory.items()}
        shapes = {name: array.shape for name, array in self._arrays.items()}
        shapes |= {name: self._memory[name][0] for name in self._inputs}
        return _RunPlan(
            layout=layout,
            context=stream.context(profile, repeated=repeated),
            shapes={name: shape for name, shape in shapes.items() if name in engine.tensors},
            addresses={name: at for name, at in addresses.items() if name in engine.tensors},
            copies=Copies(host.pointer, device, layout.changing, layout.results),
            changing=[
                (array, _view_like(host.array, layout.inputs[name].start, array))
                for name, array in self._arrays.items()
                if name in self._changing
            ],
            results=[
                (array, _view_like(host.array, layout.outputs[name].start, array))
                for name, array in self._results.items()
            ],
            repeated=repeated,
        )


def _view_like(memory: np.ndarray, start: int, like: np.ndarray) -> np.ndarray:
    """The bytes of `memory`, uint8, from `start` on, as an array with the type and shape of `like`."""
    view: Any = memory[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
    return view
