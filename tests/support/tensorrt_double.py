"""A stand-in for `tensorrt` whose engines are onnxruntime CPU sessions.

A serialized engine is JSON: file and profiles. Checks the caller: shapes within the profile, all addresses, the same
one for a cache and its update, enough scratch memory, and no launch of a graph whose context changed after the capture.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from enum import IntEnum, IntFlag
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.support.cuda_double import Gpu
from topw_deploy.plugins import library

SCRATCH = (1000, 5000)  # bytes, by profile


class Registry:
    """libraries: loaded paths; those with "topw" in the name have the plugin."""

    def __init__(self) -> None:
        self.all_creators: list[Any] = []
        self.libraries: list[str] = []

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.all_creators.append(creator)
        return True

    def load_library(self, path: str) -> object:
        self.libraries.append(path)
        if "topw" in Path(path).name:
            self.add_plugin()
        return object()

    def add_plugin(self) -> None:
        self.all_creators.append(SimpleNamespace(name="TopWSample", plugin_version="1", plugin_namespace="topw"))


class TensorRT:
    """The double; `module` replaces `tensorrt`.

    Tests set:
    refuses: the parser's message.
    fails: the builder's message.
    branches: the engine has an If, which cannot be captured.
    pruned: inputs that engines lack, with their values.
    """

    def __init__(self, gpu: Gpu, version: str = "10.16.1.11") -> None:
        self.gpu = gpu
        self.refuses = self.fails = ""
        self.branches = False
        self.pruned: dict[str, float] = {}
        self.registry = Registry()
        self.configs: list[Config] = []
        self.networks: list[Any] = []
        self.contexts: list[Context] = []
        self.module = self._module(version)

    def _module(self, version: str) -> Any:
        module: Any = ModuleType("tensorrt")
        module.__version__ = version
        module.ILogger = _Logger
        module.IProgressMonitor = _Base
        module.IStreamWriter = _Base
        module.BuilderFlag = IntEnum("BuilderFlag", {"TF32": 7})
        module.MemoryPoolType = IntEnum("MemoryPoolType", {"WORKSPACE": 0})
        module.NetworkDefinitionCreationFlag = IntEnum("NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": 1})
        strategies = ("STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED")
        module.ExecutionContextAllocationStrategy = IntEnum(
            "ExecutionContextAllocationStrategy", {name: i for i, name in enumerate(strategies)}
        )
        module.TensorLocation = IntEnum("TensorLocation", {"DEVICE": 0, "HOST": 1})
        module.Builder = lambda logger: Builder(self, logger)
        module.OnnxParser = lambda network, logger: Parser(self, network)
        module.Runtime = lambda logger: Runtime(self, logger)
        module.get_plugin_registry = lambda: self.registry
        return module


class _Base:
    def __init__(self) -> None:
        self.ready = True  # TensorRT crashes if a subclass does not call this


class _Logger(_Base):
    Severity = IntFlag("Severity", {"INTERNAL_ERROR": 1, "ERROR": 2, "WARNING": 4})


class Parser:
    """Parses only files: weights must not pass through Python."""

    def __init__(self, trt: TensorRT, network: Any) -> None:
        self._trt, self._network = trt, network
        self.num_errors = 0

    def parse_from_file(self, path: str) -> bool:
        return self.supports_model_v2(Path(path).read_bytes(), path)

    def supports_model_v2(self, data: bytes, path: str) -> bool:
        assert Path(path).read_bytes() == data
        self._network.path = path
        self.num_errors = int(bool(self._trt.refuses))
        return not self._trt.refuses

    def get_error(self, index: int) -> Any:
        return SimpleNamespace(
            desc=lambda: self._trt.refuses,
            node_name=lambda: "node",
            node_operator=lambda: "Foo",
            local_function_stack=lambda: ["Outer"],
        )


class Profile:
    """Shapes by input."""

    def __init__(self) -> None:
        self.shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, name: str, least: list[int], usual: list[int], most: list[int]) -> None:
        self.shapes[name] = [least, usual, most]


class Config:
    """The builder's configuration."""

    def __init__(self, trt: TensorRT) -> None:
        self._trt = trt
        self.flags = {trt.module.BuilderFlag.TF32}
        self.limits: dict[Any, int] = {}
        self.profiles: list[Profile] = []
        self.progress_monitor: Any = None
        self._timings = b""

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.limits[pool] = size

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, data: bytes) -> bytes:
        """Bytes that start with the module's version."""
        return data or self._trt.module.__version__.encode()

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        self._timings = cache
        return ignore_mismatch or cache.startswith(self._trt.module.__version__.encode())

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self._timings)


class Builder:
    """Builds the JSON."""

    def __init__(self, trt: TensorRT, logger: Any) -> None:
        self._trt, self._logger = trt, logger

    def create_network(self, flags: int) -> Any:
        self._trt.networks.append(SimpleNamespace(flags=flags, path=""))
        return self._trt.networks[-1]

    def create_builder_config(self) -> Config:
        self._trt.configs.append(Config(self._trt))
        return self._trt.configs[-1]

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network_to_stream(self, network: Any, config: Config, writer: Any) -> bool:
        assert writer.ready
        if not self._advance(config.progress_monitor):
            return False
        if self._trt.fails:
            self._logger.log(self._trt.module.ILogger.Severity.ERROR, self._trt.fails)
            return False
        profiles = [profile.shapes for profile in config.profiles]
        plan = json.dumps({"path": network.path, "profiles": profiles}).encode()
        half = len(plan) // 2
        return all(writer.write(part) == len(part) for part in (plan[:half], plan[half:]))

    def _advance(self, monitor: Any) -> bool:
        """Two steps, the first with three nested ones. Returns whether to continue."""
        assert monitor.ready
        monitor.phase_start("building", None, 2)
        monitor.phase_start("timing", "building", 3)
        going_on = all(monitor.step_complete("timing", step) for step in range(3))
        monitor.phase_finish("timing")
        going_on = going_on and all(monitor.step_complete("building", step) for step in range(2))
        monitor.phase_finish("building")
        return going_on


class Runtime:
    """Opens JSON from any buffer without keeping it."""

    def __init__(self, trt: TensorRT, logger: Any) -> None:
        self._trt, self._logger = trt, logger

    def deserialize_cuda_engine(self, buffer: Any) -> Engine | None:
        assert not isinstance(buffer, bytes), "the engine was read into memory"
        try:
            return Engine(self._trt, **json.loads(bytes(buffer)))
        except ValueError:
            self._logger.log(self._trt.module.ILogger.Severity.ERROR, "the plan is no plan")
            return None


class Engine:
    """An onnxruntime session and the profiles."""

    def __init__(self, trt: TensorRT, path: str, profiles: list[dict[str, list[list[int]]]]) -> None:
        self.trt, self.profiles = trt, profiles
        self.session, graph = _opened(path)
        self.inputs = {
            value.name: value.type.tensor_type.elem_type for value in graph.input if value.name not in trt.pruned
        }
        self.outputs = {
            value.name: (value.type.tensor_type.elem_type, [d.dim_value for d in value.type.tensor_type.shape.dim])
            for value in graph.output
        }
        self.num_io_tensors = len(self.inputs) + len(self.outputs)
        self.num_optimization_profiles = len(profiles)

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_location(self, name: str) -> Any:
        return self.trt.module.TensorLocation.DEVICE

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return SCRATCH[profile]

    def create_execution_context(self, strategy: Any) -> Context:
        assert strategy == self.trt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        self.trt.contexts.append(Context(self))
        return self.trt.contexts[-1]


_OPENED: dict[bytes, ort.InferenceSession] = {}
"""Sessions by their files' contents: opening takes longer than a test's runs."""


def _opened(path: str) -> tuple[ort.InferenceSession, onnx.GraphProto]:
    content = Path(path).read_bytes()
    graph = onnx.load_from_string(content).graph
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if any(tensor.external_data for tensor in graph.initializer):
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]), graph
    key = hashlib.sha256(content).digest()
    if key not in _OPENED:
        _OPENED[key] = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return _OPENED[key], graph


class Context:
    """An execution context that counts its work.

    runs: number of runs.
    touched: number of changes of shapes or addresses.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.profile = -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.touched = self.runs = 0
        self._scratch = 0

    def set_device_memory(self, pointer: int, size: int) -> None:
        self._engine.trt.gpu.at(pointer, size)
        self._scratch = size

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream in self._engine.trt.gpu.streams
        self.profile = profile
        return profile < len(self._engine.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self._engine.profiles[self.profile][name]
        self.touched += 1
        self.shapes[name] = tuple(shape)
        return len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, pointer: int) -> bool:
        self.touched += 1
        self.addresses[name] = pointer
        return pointer % 256 == 0

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine.inputs if name not in self.shapes]

    def execute_async_v3(self, handle: int) -> bool:
        """Enqueue a run; a capture is valid until the context changes."""
        trt, stream = self._engine.trt, self._engine.trt.gpu.streams[handle]
        assert self._scratch >= SCRATCH[self.profile]
        assert not self.infer_shapes()
        assert set(self.addresses) == {*self._engine.inputs, *self._engine.outputs}
        if trt.branches and stream.captured is not None:
            stream.spoiled = True
            return False
        state = self.touched, dict(self.shapes), dict(self.addresses)
        captured = stream.captured is not None

        def work() -> None:
            assert not captured or state[0] == self.touched, "the graph's context was touched after it was captured"
            self.runs += 1
            self._run(state[1], state[2])

        stream.put(work)
        return True

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        engine, gpu = self._engine, self._engine.trt.gpu
        binding = engine.session.io_binding()
        for name, kind in engine.inputs.items():
            gpu.at(addresses[name], _bytes(kind, shapes[name]))
            binding.bind_input(name, "cpu", 0, kind, shapes[name], addresses[name])
        batch = shapes["input_ids"][0]
        for name, value in engine.trt.pruned.items():
            binding.bind_cpu_input(name, np.full(batch, value, np.float32))
        for name, (kind, sizes) in engine.outputs.items():
            if name.startswith("present."):
                past = addresses.get(name.replace("present", "past_key_values", 1))
                assert past in (None, addresses[name]), "keys and values are updated where they lie"
                before = addresses.get(name.replace("present", "past", 1))
                assert before != addresses[name], "a state of fixed size is not updated where it lies"
            shape = (batch, *sizes[1:])
            gpu.at(addresses[name], _bytes(kind, shape))
            binding.bind_output(name, "cpu", 0, kind, shape, addresses[name])
        engine.session.run_with_iobinding(binding)


def _bytes(kind: int, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize


def install(patch: pytest.MonkeyPatch, gpu: Gpu, trt: TensorRT) -> None:
    """Replace `tensorrt`, `cuda.bindings.runtime` and the driver."""
    package: Any = ModuleType("cuda")
    bindings: Any = ModuleType("cuda.bindings")
    package.bindings, bindings.runtime = bindings, gpu.module
    for name, module in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.runtime", gpu.module)):
        patch.setitem(sys.modules, name, module)
    patch.setitem(sys.modules, "tensorrt", trt.module)
    patch.setattr(library, "query_driver", gpu.look)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def trt(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> TensorRT:
    """TensorRT with the sampler's plugin in its registry."""
    double = TensorRT(gpu)
    double.registry.add_plugin()
    install(monkeypatch, gpu, double)
    return double


@pytest.fixture
def no_plugin(trt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugin in the registry, and none to register."""
    trt.registry.all_creators.clear()
    monkeypatch.setattr(library, "library_path", lambda kind: None)
    monkeypatch.setattr(library, "why_absent", lambda kind: "the CUDA library is absent")
