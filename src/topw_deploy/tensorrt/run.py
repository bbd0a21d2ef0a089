"""Runs a TensorRT engine behind the session and binding protocols of `topw_deploy.runtime`.

Imports TensorRT and CUDA only when a model is opened. A step copies all changing inputs at once, and all results at
once. Both copies use pinned memory and belong to the CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from topw_deploy.device_lock import DeviceLock
from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.errors import GenerationError, TensorRTError
from topw_deploy.folders import map_file
from topw_deploy.manifest import DecoderManifest
from topw_deploy.sampling.row import mask_words
from topw_deploy.tensorrt import check
from topw_deploy.tensorrt.cuda import Allocation, CacheMemory, Context, Copies, CudaDevice, PinnedMemory, Span, Stream
from topw_deploy.tensorrt.stamp import find_fitting_engine, find_profile, this_platform

_ALIGNMENT = 256  # bytes: CUDA's allocation alignment, on which TensorRT's kernels rely
_BYTES = {each.number: each.bits // 8 for each in ELEMENT_TYPES.values()}  # per element, by ONNX's number of the type
_SMALLEST = 64 << 10  # bytes: enough for most steps and prompt chunks


class TensorRTSession:
    """Implements the runtime's session protocol over the engine of `folder` that fits GPU number `device`.

    Raises TensorRTError if TensorRT, CUDA, a fitting engine or its plugin is missing or fails.

    tensors: names of the engine's own inputs and outputs; it has no inputs that its graph does not read.
    results: the outputs but the states.
    fixed: names of the outputs that are states of fixed size. TensorRT updates only keys and values in place, so these
        are computed elsewhere and then copied.
    """

    provider = "tensorrt"
    cpu_nodes: tuple[Any, ...] = ()
    most_rows: int | None
    most_columns: int | None
    most_edits: int | None
    attends_alone = False

    def __init__(self, folder: Path, manifest: DecoderManifest, lock: DeviceLock, device: int = 0) -> None:
        trt = check.load_tensorrt()
        path, self.stamp = find_fitting_engine(folder, this_platform(str(trt.__version__), device))
        plugin = self.stamp.plugin
        if plugin:
            why = check.register_plugin(trt) if plugin == check.BUILT_WITH else ""
            if why or plugin != check.BUILT_WITH:
                why = why or f"this is version {check.BUILT_WITH}"
                raise TensorRTError(
                    f"{path} needs version {plugin} of the sampler's plugin, but {why}; build it again with "
                    f"`topw build-engine {folder}`."
                )
        self.sampler: Literal["native", "plugin", "graph"] = "plugin" if plugin else "graph"
        self.why_graph = "" if plugin else "the engine was built without the plugin"
        self.inputs = frozenset(spec.name for spec in manifest.inputs)
        self.outputs = tuple(spec.name for spec in manifest.outputs)
        slots = next(spec.shape[1] for spec in manifest.inputs if spec.name == "edit_ids")
        self.fixed_edits = slots if isinstance(slots, int) else None
        self.mask_words, self.always_masked = mask_words(manifest.sampler.vocab_size), True
        self.most_rows, self.most_columns, self.most_edits = self.stamp.most
        self.results = [spec for spec in manifest.outputs if not spec.name.startswith("present.")]
        self.fixed = frozenset(state.present for state in manifest.decoder.states if not state.grows)
        try:
            self.cuda = CudaDevice(lock, device)
            with lock.opening():
                self._open(trt, path)
        except GenerationError as error:
            raise TensorRTError(f"{path} cannot be opened: {error}") from None

    def _open(self, trt: Any, path: Path) -> None:
        self._trt, self._logger = trt, check.new_logger(trt)
        self._runtime = check.create_object(trt, "Runtime", self._logger)  # must outlive the engine
        with map_file(path) as view:
            self._engine = self._runtime.deserialize_cuda_engine(view)
        if self._engine is None:
            raise TensorRTError(f"TensorRT cannot open {path} ({check.first_error(self._logger)})")
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        elsewhere = [name for name in names if self._engine.get_tensor_location(name) != trt.TensorLocation.DEVICE]
        if elsewhere:
            raise TensorRTError(f"the engine needs {', '.join(elsewhere)} in host memory")
        self.tensors = frozenset(names)
        self._free = [self._new_stream()]

    def bind(self) -> TensorRTBinding:
        """A binding on an unused stream, or on a new one. Its `close` returns the stream."""
        with suppress(IndexError):
            return TensorRTBinding(self, self._free.pop())
        with self.cuda.lock.shared_use:
            self.cuda.use()
            return TensorRTBinding(self, self._new_stream())

    def return_stream(self, stream: EngineStream) -> None:
        self._free.append(stream)  # atomic, so it needs no lock: garbage collection may call this anywhere

    def memory(self, size: int) -> CacheMemory:
        return CacheMemory(self.cuda, size)

    @property
    def why_no_graph(self) -> str:
        """Why steps are not launched as a CUDA graph; "" if they are."""
        free = tuple(self._free)  # a copy, as other threads change it
        return next((c.why_no_graph for stream in free for c in stream.contexts if c.why_no_graph), "")

    def profile_for(self, batch: int, sequence: int, edits: int) -> int:
        """Number of the profile for a run of this shape. Raises GenerationError if none covers it."""
        found = find_profile(self.stamp.profiles, batch, sequence, edits)
        if found is None:
            raise GenerationError(
                f"the engine has no profile for {batch} rows, {sequence} new tokens and {edits} edits; build it with "
                "larger bounds."
            )
        return found

    def _new_stream(self) -> EngineStream:
        return EngineStream(self._trt, self._engine, self.cuda, self._logger)


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

    def __init__(self, session: TensorRTSession, stream: EngineStream, *, owns: bool = True) -> None:
        self._session, self._stream, self._owns = session, stream, owns
        self._arrays: dict[str, np.ndarray] = {}
        self._changing: set[str] = set()
        self._stale: set[str] = set()  # inputs not yet copied to the device
        self._results: dict[str, np.ndarray] = {}
        self._memory: dict[str, tuple[tuple[int, ...], int]] = {}  # name of a cache's tensor -> its shape and address
        self._fixed: dict[str, tuple[int, int]] = {}  # name of an output that is copied -> its address and bytes
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
        """Bind a state's input `source` and output `target` to one address, if TensorRT updates it in place."""
        self._plan = None
        self._memory[source] = (tuple(shape), pointer)
        self._inputs.add(source)
        if target in self._session.fixed:
            self._fixed[target] = pointer, math.prod(shape) * _BYTES[element_type]
        else:
            self._memory[target] = self._memory[source]

    def bind_result(self, name: str, array: np.ndarray) -> None:
        self._plan = None
        self._results[name] = array

    def new_sibling(self) -> TensorRTBinding:
        return TensorRTBinding(self._session, self._stream, owns=False)

    def close(self) -> None:
        """Wait for an interrupted run, and return the stream to the engine unless CUDA fails on the stream."""
        if self._owns and not self._closed:
            self._closed = True
            with suppress(GenerationError):
                self._session.cuda.use()
                self._stream.cuda_stream.wait()
                self._session.return_stream(self._stream)

    def run(self, step: int | None = None) -> None:
        try:
            with self._session.cuda.lock.shared_use:
                plan = self._compute(repeated=bool(step))  # step 0 runs the prompts' last chunk
        except GenerationError as error:
            self._stream.loaded = None
            where = "in the prompt" if step is None else f"at step {step}"
            raise GenerationError(f"the engine failed {where}: {error}") from None
        for array, pinned in plan.results:
            array[...] = pinned

    def _compute(self, *, repeated: bool) -> _RunPlan:
        stream = self._stream
        self._session.cuda.use()
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
                device, host = stream.device.pointer + span.start, stream.host.pointer + span.start
                stream.cuda_stream.copy(device, host, span.size, "HostToDevice")
        self._stale.clear()

    def _new_plan(self, repeated: bool) -> _RunPlan:
        session, stream = self._session, self._stream
        ids, edits = self._arrays["input_ids"], self._arrays["edit_ids"]
        batch, sequence = ids.shape
        profile = session.profile_for(batch, sequence, edits.shape[1])
        unread = {
            spec.name: batch * math.prod(map(int, spec.shape[1:])) * ELEMENT_TYPES[spec.dtype].bits // 8
            for spec in session.results
            if spec.name not in self._results
        }
        unread |= {name: size for name, (_, size) in self._fixed.items()}
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
            shapes={name: shape for name, shape in shapes.items() if name in session.tensors},
            addresses={name: at for name, at in addresses.items() if name in session.tensors},
            copies=Copies(
                host.pointer,
                device,
                layout.changing,
                layout.results,
                tuple((pointer, addresses[name], size) for name, (pointer, size) in self._fixed.items()),
            ),
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


class MemoryLayout:
    """The places of the small tensors: changing inputs, other inputs, results, then unread outputs.

    changing: names of the inputs that are copied for every run; afterwards the span of all of them.
    arrays: all inputs by name.
    results: outputs that the caller reads, by name; afterwards the span of all of them.
    unread: bytes of the other outputs by name. They have no place on the host.
    """

    def __init__(
        self,
        changing: Iterable[str],
        arrays: Mapping[str, np.ndarray],
        results: Mapping[str, np.ndarray],
        unread: Mapping[str, int],
    ) -> None:
        self._end = 0
        self.inputs: dict[str, Span] = {}
        first = [name for name in arrays if name in set(changing)]
        for name in first:
            self.inputs[name] = self._place(arrays[name].nbytes)
        self.changing = Span(0, self._end)
        for name in arrays:
            if name not in self.inputs:
                self.inputs[name] = self._place(arrays[name].nbytes)
        begin = self._end
        self.outputs = {name: self._place(array.nbytes) for name, array in results.items()}
        self.results = Span(begin, self._end - begin)
        self.host_size = self._end
        self.outputs |= {name: self._place(size) for name, size in unread.items()}
        self.device_size = self._end

    def _place(self, size: int) -> Span:
        """Append `size` bytes. An empty tensor gets an address, too."""
        span = Span(self._end, size)
        self._end += -(-max(1, size) // _ALIGNMENT) * _ALIGNMENT
        return span


class EngineStream:
    """A CUDA stream with its execution contexts and its memory for small tensors.

    host, device: the memory for small tensors.
    loaded: the plan whose inputs are on the device; None for no plan.
    """

    def __init__(self, trt: Any, engine: Any, cuda: CudaDevice, logger: Any) -> None:
        self._trt, self._engine, self._cuda, self._logger = trt, engine, cuda, logger
        self.cuda_stream = Stream(cuda)
        self._contexts: dict[tuple[int, bool], Context] = {}
        self._scratch: Allocation | None = None
        self.host: PinnedMemory = cuda.allocate_pinned(0)
        self.device: Allocation = cuda.allocate(0)
        self.loaded: object = None

    @property
    def contexts(self) -> list[Context]:
        return list(self._contexts.values())

    def reserve(self, layout: MemoryLayout) -> None:
        """Grow the memory to hold `layout`. New memory has other addresses, and none of the old contents."""
        if layout.host_size > self.host.size:
            self.host = self._cuda.allocate_pinned(_round_up(layout.host_size))
            self.loaded = None
        if layout.device_size > self.device.size:
            self.device = self._cuda.allocate(_round_up(layout.device_size))
            self.loaded = None

    def context(self, profile: int, *, repeated: bool) -> Context:
        """The context for profile number `profile`, created on first use.

        repeated: whether it is for repeated steps. They have a context of their own, so that prompts do not discard its
        CUDA graph.
        """
        found = self._contexts.get((profile, repeated))
        if found is None:
            if self._scratch is None:
                profiles = range(self._engine.num_optimization_profiles)
                self._scratch = self._cuda.allocate(
                    max(map(self._engine.get_device_memory_size_for_profile_v2, profiles))
                )
            found = Context(self._trt, self._engine, profile, self.cuda_stream, self._scratch, self._logger)
            self._contexts[profile, repeated] = found
        return found


def _round_up(size: int) -> int:
    """The next power of two, so that longer prompts seldom move the memory, which discards graphs."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())
