"""A session's inputs, outputs and cache in device memory.

Each step makes one upload of changed inputs and one download of results. Tensors of equal shapes get equal addresses,
so that later generations can replay a step's CUDA graph. One thread runs the graphs (RunThread), and nothing else uses
the device while a graph is captured (device_lock.py).

Tested with test doubles of the device and the CUDA runtime; not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnxruntime as ort

from topw_deploy.device_lock import device_lock
from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.errors import GenerationError, one_line
from topw_deploy.runtime.cache.buffers import REMEDY, allocate_zeros
from topw_deploy.runtime.ort.session import HostBinding, OrtSession
from topw_deploy.text import decimal_size

_LEAST_BYTES = {"changing": 4 << 10, "rest": 64 << 10, "results": 4 << 10}  # bytes; enough for most requests
_MOST_GRAPHS = 64  # per session: each graph keeps device memory until the session closes

_ALIGNMENT = 256  # bytes, as in CUDA's allocator
_NO_GRAPH = "-1"
_ELEMENT_NUMBERS = {kind.numpy: kind.number for kind in ELEMENT_TYPES.values()}


class Area:
    """Device memory and a host array of equal size. Copies always transfer the whole area."""

    def __init__(self, size: int, device: tuple[str, int]) -> None:
        self.size = size
        self.host = np.zeros(size, np.uint8)
        self._value = ort.OrtValue.ortvalue_from_numpy(self.host, *device)
        self.pointer: int = self._value.data_ptr()

    def upload(self) -> None:
        self._value.update_inplace(self.host)

    def download(self) -> None:
        self.host[:] = self._value.numpy()


class DeviceMemory:
    """Memory of a device (kind, number), initially zero, that onnxruntime allocates. See `Memory`.

    Raises GenerationError if the allocation fails.
    """

    def __init__(self, size: int, device: tuple[str, int]) -> None:
        self.size, self._shared_use = size, device_lock(device).shared_use
        zeros = allocate_zeros("the cache", (size,), np.uint8)
        try:
            with self._shared_use:
                self._value = ort.OrtValue.ortvalue_from_numpy(zeros, *device)
        except Exception as error:  # noqa: BLE001  # unrelated classes
            raise GenerationError(
                f"the cache would take {decimal_size(size)} of {device[0]} {device[1]}, which cannot allocate it "
                f"({one_line(error, 200)}); {REMEDY}."
            ) from None
        self.pointer: int = self._value.data_ptr()

    def clear(self, size: int) -> None:
        """Zero all bytes, not only `size`, because onnxruntime copies whole values."""
        with self._shared_use:
            self._value.update_inplace(np.zeros(self.size, np.uint8))

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        with self._shared_use:
            host = self._value.numpy()
            edit(host)
            self._value.update_inplace(host)


class StepBuffers:
    """One generation's memory for small tensors.

    areas: "changing", the inputs that every run copies; "rest", the other inputs; and "results".
    loaded: the binding whose inputs are in the memory, or None.
    """

    def __init__(self, device: tuple[str, int]) -> None:
        self._device = device
        self.areas = {name: Area(size, device) for name, size in _LEAST_BYTES.items()}
        self.loaded: object = None

    def reserve(self, sizes: dict[str, int]) -> None:
        """Replace areas that are smaller than `sizes`, in bytes by area."""
        for name, size in sizes.items():
            if size > self.areas[name].size:
                self.areas[name] = Area(1 << (size - 1).bit_length(), self._device)
                self.loaded = None


@dataclass
class StepGraph:
    """A step's CUDA graph.

    options: of runs that capture or replay the graph; None without CUDA graphs.
    captured: whether a run has captured it.
    """

    options: ort.RunOptions | None
    captured: bool = False


class BufferPool:
    """A session's bindings, StepBuffers, memory and CUDA graphs.

    The pool has no lock: garbage collection can close a binding at any point, and would take the lock twice. A list's
    `pop` and `append` are atomic, and only `thread` uses the graphs.

    thread: the thread that runs a session with CUDA graphs, or None.
    uncaptured: for runs that no graph captures.
    """

    def __init__(self, device: tuple[str, int], *, graphs: bool) -> None:
        self._device, self._free = device, list[StepBuffers]()
        self._graphs: dict[object, StepGraph] = {}
        self.lock = device_lock(device)
        self.thread = RunThread() if graphs else None
        self.uncaptured = StepGraph(_new_run_options(_NO_GRAPH) if graphs else None, captured=True)

    def bind(self, session: OrtSession) -> DeviceBinding:
        return DeviceBinding(session, self)

    def memory(self, size: int) -> DeviceMemory:
        return DeviceMemory(size, self._device)

    def borrow(self) -> StepBuffers:
        """Lend buffers to a generation."""
        with suppress(IndexError):
            return self._free.pop()
        with self.lock.shared_use:
            return StepBuffers(self._device)

    def give_back(self, buffers: StepBuffers) -> None:
        """Take buffers back."""
        buffers.loaded = None  # otherwise it would keep the session open
        self._free.append(buffers)

    def graph(self, bound: object) -> StepGraph:
        """The CUDA graph of a step, which the graph's first run captures. bound: names, addresses and shapes."""
        if self.thread is None:
            return self.uncaptured
        if bound not in self._graphs and len(self._graphs) < _MOST_GRAPHS:
            self._graphs[bound] = StepGraph(_new_run_options(str(len(self._graphs) + 1)))
        return self._graphs.get(bound, self.uncaptured)


def _new_run_options(graph: str) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph)
    return options


class DeviceBinding(HostBinding):
    """A binding that copies host arrays to and from StepBuffers. Bindings made by `new_sibling` share the buffers."""

    def __init__(self, session: OrtSession, pool: BufferPool, buffers: StepBuffers | None = None) -> None:
        super().__init__(session)
        self._pool, self._buffers, self._owns_buffers = pool, buffers or pool.borrow(), buffers is None
        self._results: dict[str, np.ndarray] = {}
        self._memory: dict[str, tuple[object, ...]] = {}
        self._on_host: dict[str, np.ndarray] = {}
        self._changing: set[str] = set()
        self._bound_areas: dict[str, Area] = {}  # areas whose addresses are bound
        self._is_stale = True  # whether inputs other than "changing" ones changed
        self._copies: dict[str, list[tuple[str, np.ndarray]]] = {}  # (name, host view) per area
        self._graph: StepGraph | None = None

    def bind_array(self, name: str, array: np.ndarray) -> None:
        known = self._arrays.get(name)
        if known is None or known.shape != array.shape or name in self._changing:
            self._bound_areas = {}
        self._changing.discard(name)
        self._arrays[name] = array
        self._is_stale = True

    def bind_changing(self, name: str, array: np.ndarray) -> None:
        self.bind_array(name, array)
        self._changing.add(name)
        self._bound_areas = {}

    def bind_on_host(self, name: str, array: np.ndarray) -> None:
        self._on_host[name] = array
        self._io.bind_input(name, array)
        self._graph = None

    def refresh(self, name: str) -> None:
        self._is_stale = True

    def bind_result(self, name: str, array: np.ndarray) -> None:
        self._results[name] = array
        self._bound_outputs.append(name)
        self._io.bind_output(name, self._device)  # `_bind_areas` sets its memory
        self._bound_areas = {}

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        super().bind_memory(source, target, element_type, shape, pointer)
        self._memory[source] = (element_type, tuple(shape), pointer)
        self._graph = None

    def new_sibling(self) -> DeviceBinding:
        return DeviceBinding(self._session, self._pool, self._buffers)

    def close(self) -> None:
        if self._owns_buffers:
            self._owns_buffers = False
            self._pool.give_back(self._buffers)

    def run(self, step: int | None = None) -> None:
        if self._pool.thread is None:
            self._run_here(step)
        else:
            self._pool.thread.call(partial(self._run_here, step))
        for name, place in self._copies["results"]:
            self._results[name][...] = place

    def _run_here(self, step: int | None) -> None:
        lock = self._pool.lock
        with lock.shared_use:
            self._upload_inputs()
            # Prompt runs, up to step 0, have varying shapes.
            graph = self._step_graph() if step else self._pool.uncaptured
            if graph.captured:
                self._compute_and_download(step, graph)
                return
        with lock.capturing() as captures:
            self._compute_and_download(step, graph if captures else self._pool.uncaptured)
            graph.captured = captures

    def _compute_and_download(self, step: int | None, graph: StepGraph) -> None:
        self._options = graph.options
        super().run(step)
        if step is not None:
            self._buffers.areas["results"].download()

    def _upload_inputs(self) -> None:
        buffers = self._buffers
        if not self._bound_areas or any(buffers.areas[name] is not area for name, area in self._bound_areas.items()):
            self._bind_areas()
        changed = ("changing", "rest") if self._is_stale or buffers.loaded is not self else ("changing",)
        for name in changed:
            for input_, place in self._copies[name]:
                place[...] = self._arrays[input_]
            buffers.areas[name].upload()
        self._is_stale, buffers.loaded = False, self

    def _bind_areas(self) -> None:
        changing = {name: array for name, array in self._arrays.items() if name in self._changing}
        rest = {name: array for name, array in self._arrays.items() if name not in self._changing}
        parts = {"changing": changing, "rest": rest, "results": self._results}
        starts: dict[str, int] = {}  # byte offsets in the areas, equal for equal shapes
        sizes = dict.fromkeys(parts, 0)
        for part, arrays in parts.items():
            for name in sorted(arrays):
                starts[name] = sizes[part]
                sizes[part] += -(-max(1, arrays[name].nbytes) // _ALIGNMENT) * _ALIGNMENT
        self._buffers.reserve(sizes)
        self._bound_areas, self._is_stale, self._graph = dict(self._buffers.areas), True, None
        for part, arrays in parts.items():
            area = self._bound_areas[part]
            bind = self._io.bind_output if part == "results" else self._io.bind_input
            self._copies[part] = []
            for name, array in arrays.items():
                start = starts[name]
                place = area.host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
                self._copies[part].append((name, place))
                bind(name, self._device, _ELEMENT_NUMBERS[array.dtype.name], array.shape, area.pointer + start)

    def _step_graph(self) -> StepGraph:
        if self._graph is None:
            arrays = {**self._arrays, **self._results}
            pointers = tuple(area.pointer for area in self._bound_areas.values())
            shapes = tuple((name, name in self._changing, arrays[name].shape) for name in sorted(arrays))
            # A capture fixes the values of inputs that are read on the host.
            constants = tuple((name, array.tobytes()) for name, array in sorted(self._on_host.items()))
            self._graph = self._pool.graph((pointers, shapes, constants, tuple(sorted(self._memory.items()))))
        return self._graph


class RunThread:
    """The thread that runs a session with CUDA graphs. The first call starts it; it ends with this object.

    onnxruntime keeps handles and CUDA graphs per thread until the session closes. So if callers ran the session in
    their own threads, each new thread would capture again, without limit.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "topw-cuda-graphs")

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the thread, wait, and raise its errors.

        A caller that is interrupted waits too, because `function` uses the caller's objects.
        """
        future = self._executor.submit(function)
        try:
            future.result()
        finally:
            wait([future])
            del future  # its error refers to this frame, and so to the session
