"""The inputs and outputs of a generation's runs where onnxruntime computes in memory of its own, see face.py.

What a step changes goes to the device in one copy, and what it gives comes back in another. Everything lies at the same
address as long as its shape is the same, also in the next generation: so a CUDA graph of a step can be run again.

Steps with graphs run on one thread of the session (worker.py), and are captured while nobody else uses the device
(turns.py).

Run in tests by onnxruntime's CPU provider, with a double of the device, and by its CUDA provider, over a stand-in for
CUDA's runtime whose kernels do nothing; not run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort

from topw_deploy.runtime.binding import Binding
from topw_deploy.runtime.turns import turns_of
from topw_deploy.runtime.worker import Worker

if TYPE_CHECKING:
    from topw_deploy.runtime.session import OpenGraph

_LEAST = {"changing": 4 << 10, "rest": 64 << 10, "results": 4 << 10}  # bytes: more than most requests need
_MOST_GRAPHS = 64  # of one session: each keeps memory on the device until the session is closed

_ALIGNMENT = 256  # bytes: what CUDA's own allocator gives
_NOT_CAPTURED = "-1"
_END = ""  # no input or output has this name
_ELEMENTS = {"float32": 1, "int32": 6, "int64": 7, "bool": 9}  # numpy's names, onnx's TensorProto.DataType


class Area:
    """Memory of the device and its like on the host, copied as a whole."""

    def __init__(self, size: int, device: tuple[str, int]) -> None:
        self.size = size
        self.host = np.zeros(size, np.uint8)
        self._value = ort.OrtValue.ortvalue_from_numpy(self.host, *device)
        self.pointer: int = self._value.data_ptr()

    def upload(self) -> None:
        self._value.update_inplace(self.host)

    def download(self) -> None:
        self.host[:] = self._value.numpy()


class Lane:
    """The memory that one generation at a time has of a session: an area each for the inputs that every run copies, for
    the other inputs, and for the results. `loaded` is whose inputs are in it."""

    def __init__(self, device: tuple[str, int]) -> None:
        self._device = device
        self.areas = {name: Area(size, device) for name, size in _LEAST.items()}
        self.loaded: object = None

    def reserve(self, sizes: dict[str, int]) -> None:
        """Have at least so many bytes in each area."""
        for name, size in sizes.items():
            if size > self.areas[name].size:
                self.areas[name] = Area(1 << (size - 1).bit_length(), self._device)
                self.loaded = None


@dataclass
class Graph:
    """A CUDA graph: how to run its step, and whether a run has captured it. One that can never be is `uncaptured`."""

    options: ort.RunOptions | None
    captured: bool = False


class Lanes:
    """The lanes of a session, and its CUDA graphs. worker: the thread that runs it, where it has graphs."""

    def __init__(self, device: tuple[str, int], *, graphs: bool) -> None:
        self._device, self._free = device, list[Lane]()
        self._graphs: dict[object, Graph] = {}
        self._lock = threading.Lock()
        self.turns = turns_of(device)
        self.worker = Worker() if graphs else None
        self.uncaptured = Graph(_run_options(_NOT_CAPTURED) if graphs else None, captured=True)
        """How to run what does not come again."""

    def borrow(self) -> Lane:
        with self._lock:
            if self._free:
                return self._free.pop()
        with self.turns.using:
            return Lane(self._device)

    def give_back(self, lane: Lane) -> None:
        lane.loaded = None  # or the lane would keep the session open until the garbage collector comes
        with self._lock:
            self._free.append(lane)

    def graph(self, bound: object) -> Graph:
        """The CUDA graph of exactly these names, addresses and shapes, to be captured by its first run."""
        if self.worker is None:
            return self.uncaptured
        with self._lock:
            if bound not in self._graphs and len(self._graphs) < _MOST_GRAPHS:
                self._graphs[bound] = Graph(_run_options(str(len(self._graphs) + 1)))
            return self._graphs.get(bound, self.uncaptured)


def _run_options(graph: str) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph)
    return options


class DeviceBinding(Binding):
    """Bindings into a lane. Those that `another` makes share it, and are used between runs of this one."""

    def __init__(self, session: OpenGraph, lanes: Lanes, lane: Lane | None = None) -> None:
        super().__init__(session)
        self._lanes, self._lane, self._owns = lanes, lane or lanes.borrow(), lane is None
        self._results: dict[str, np.ndarray] = {}
        self._memory: dict[str, tuple[object, ...]] = {}
        self._on_host: dict[str, np.ndarray] = {}
        self._changes: set[str] = set()
        self._placed: dict[str, Area] = {}  # the areas that the bound addresses are in; empty: nothing is bound yet
        self._stale = True  # whether the device has not seen the other inputs as they are
        self._copies: dict[str, list[tuple[str, np.ndarray]]] = {}  # names of an area, and their places on the host
        self._graph: Graph | None = None  # of a step of what is bound; None: not known

    def bind_array(self, name: str, array: np.ndarray) -> None:
        known = self._arrays.get(name)
        if known is None or known.shape != array.shape or name in self._changes:
            self._placed = {}
        self._changes.discard(name)
        self._arrays[name] = array
        self._stale = True

    def bind_changing(self, name: str, array: np.ndarray) -> None:
        self.bind_array(name, array)
        self._changes.add(name)
        self._placed = {}

    def bind_on_host(self, name: str, array: np.ndarray) -> None:
        self._on_host[name] = array
        self._io.bind_input(name, array)
        self._graph = None

    def refresh(self, name: str) -> None:
        self._stale = True

    def bind_result(self, name: str, array: np.ndarray) -> None:
        self._results[name] = array
        self._bound_outputs.append(name)
        self._io.bind_output(name, self._device)  # which keeps its place among the outputs; its memory follows
        self._placed = {}

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        super().bind_memory(source, target, element_type, shape, pointer)
        self._memory[source] = (element_type, tuple(shape), pointer)
        self._graph = None

    def another(self) -> DeviceBinding:
        return DeviceBinding(self._session, self._lanes, self._lane)

    def close(self) -> None:
        if self._owns:
            self._owns = False
            self._lanes.give_back(self._lane)

    def run(self, step: int | None = None) -> None:
        if self._lanes.worker is None:
            self._run_here(step)
        else:
            self._lanes.worker.call(partial(self._run_here, step))
        for name, place in self._copies["results"]:
            self._results[name][...] = place

    def _run_here(self, step: int | None) -> None:
        turns = self._lanes.turns
        with turns.using:
            self._load()
            # The runs of a prompt, of which step 0 is the last, have shapes of their own.
            graph = self._repeated() if step else self._lanes.uncaptured
            if graph.captured:
                self._compute_and_download(step, graph)
                return
        with turns.capturing() as captures:
            self._compute_and_download(step, graph if captures else self._lanes.uncaptured)
            graph.captured = captures

    def _compute_and_download(self, step: int | None, graph: Graph) -> None:
        self._compute(step, graph.options)
        if step is not None:
            self._lane.areas["results"].download()

    def _load(self) -> None:
        """Have every input on the device, at a place that is bound."""
        lane = self._lane
        if not self._placed or any(lane.areas[name] is not area for name, area in self._placed.items()):
            self._place()
        changed = ("changing", "rest") if self._stale or lane.loaded is not self else ("changing",)
        for name in changed:
            for input_, place in self._copies[name]:
                place[...] = self._arrays[input_]
            lane.areas[name].upload()
        self._stale, lane.loaded = False, self

    def _place(self) -> None:
        """Give every array a place, and bind it."""
        changing = {name: array for name, array in self._arrays.items() if name in self._changes}
        rest = {name: array for name, array in self._arrays.items() if name not in self._changes}
        parts = {"changing": changing, "rest": rest, "results": self._results}
        starts = {part: _starts(arrays) for part, arrays in parts.items()}
        self._lane.reserve({part: found[_END] for part, found in starts.items()})
        self._placed, self._stale, self._graph = dict(self._lane.areas), True, None
        for part, arrays in parts.items():
            area = self._placed[part]
            bind = self._io.bind_output if part == "results" else self._io.bind_input
            self._copies[part] = list(_places(area, arrays, starts[part]))
            for name, array in arrays.items():
                pointer = area.pointer + starts[part][name]
                bind(name, self._device, _ELEMENTS[array.dtype.name], array.shape, pointer)

    def _repeated(self) -> Graph:
        if self._graph is None:
            arrays = {**self._arrays, **self._results}
            pointers = tuple(area.pointer for area in self._placed.values())
            shapes = tuple((name, name in self._changes, arrays[name].shape) for name in sorted(arrays))
            # What is read on the host is captured with what it holds.
            constants = tuple((name, array.tobytes()) for name, array in sorted(self._on_host.items()))
            self._graph = self._lanes.graph((pointers, shapes, constants, tuple(sorted(self._memory.items()))))
        return self._graph


def _starts(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Where in an area each array begins, by names in their order, so that equal shapes give equal places; and the end.
    An array without elements has a place too."""
    starts, end = {}, 0
    for name in sorted(arrays):
        starts[name] = end
        end += -(-max(1, arrays[name].nbytes) // _ALIGNMENT) * _ALIGNMENT
    return {**starts, _END: end}


def _places(
    area: Area, arrays: Mapping[str, np.ndarray], starts: Mapping[str, int]
) -> Iterator[tuple[str, np.ndarray]]:
    """Each name with its array's place in the area's host memory."""
    for name, array in arrays.items():
        place = area.host[starts[name] : starts[name] + array.nbytes]
        yield name, place.view(array.dtype).reshape(array.shape)
