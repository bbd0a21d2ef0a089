"""The plugin as a Python class: TensorRT calls it for sizes and types, and to enqueue the kernels of the CUDA library.

It needs no C++ compiler and no header of TensorRT, only `topw plugins build --cuda`. A step enqueues the kernels alone,
so a CUDA graph records it, and a replayed graph never comes back to Python.

Importing this module imports TensorRT. Built and parsed with NVIDIA's parser and builder; enqueued by tests on a CPU
with the emulated kernels, not on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from topw_deploy.plugins.tensorrt.kernels import Kernels, installed_kernels
from topw_deploy.plugins.tensorrt.module import NAME, NAMESPACE, VERSION, tensorrt_module
from topw_deploy.plugins.tensorrt.node import (
    FLOATS,
    OUTPUT_TYPES,
    NodeSettings,
    Tensor,
    check_engine,
    describe,
)

trt: Any = tensorrt_module()

_TYPES = {
    "float32": trt.float32,
    "float16": trt.float16,
    "bfloat16": trt.bfloat16,
    "int32": trt.int32,
    "int64": trt.int64,
    "bool": trt.bool,
}
_NAMES = {value: name for name, value in _TYPES.items()}
_FLOATS = tuple(_TYPES[name] for name in FLOATS)


class TopWSamplePlugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
    """One node. settings: its attributes. kernels: what enqueues its work.

    Its methods are those of TensorRT's interfaces and are called by TensorRT alone. What they raise TensorRT prints and
    answers by failing to build or to run.

    Every object has control memory of its own (control.py), allocated when its shape is known. TensorRT clones the
    plugin for each execution context, so contexts that run at once on several streams do not share it.
    """

    def __init__(self, settings: NodeSettings, kernels: Kernels) -> None:
        for base in TopWSamplePlugin.__bases__:
            base.__init__(self)
        self.plugin_name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
        self.num_outputs = len(settings.outputs)
        self.settings = settings
        self.kernels = kernels
        # The types that the graph gives to logits and table, noted where TensorRT tells them; float32 until then.
        self.given = {"logits": trt.float32, "table": trt.float32}
        self._control = kernels.control_memory()
        self._written: list[Any] = []

    def get_capability_interface(self, kind: Any) -> Any:
        return self

    def clone(self) -> TopWSamplePlugin:
        copy = TopWSamplePlugin(self.settings, self.kernels)
        copy.given = dict(self.given)
        return copy

    def destroy(self) -> None:
        """Called when TensorRT deletes the plugin, here with its execution context. TensorRT's module keeps references
        to the Python object, which is then never collected: memory has to be freed now."""
        self._control.release()

    # ---- while an engine is built

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        given = dict(zip(self.settings.inputs, input_types, strict=True))
        self.given = {name: given[name] for name in self.given if name in given}
        return [_TYPES[OUTPUT_TYPES[name]] for name in self.settings.outputs]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
        logits, shapes = inputs[0], []
        for name in self.settings.outputs:
            shape = trt.DimsExprs(2 if name == "keep_mask" else 1)
            for axis in range(len(shape)):
                shape[axis] = logits[axis]
            shapes.append(shape)
        return shapes

    def supports_format_combination(self, position: int, tensors: Sequence[Any], inputs: int) -> bool:
        """Every tensor in the one type that the graph gives it: a builder free to choose may not round logits."""
        tensor = tensors[position].desc
        if tensor.format != trt.TensorFormat.LINEAR:
            return False
        if position >= inputs:
            return bool(tensor.type == _TYPES[OUTPUT_TYPES[self.settings.outputs[position - inputs]]])
        name = self.settings.inputs[position]
        if name in self.given:
            return tensor.type in _FLOATS and tensor.type == self.given[name]
        return bool(tensor.type == (trt.int64 if name == "edit_ids" else trt.float32))

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.kernels.check(describe(self.settings, _largest(inputs)))

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return self.kernels.workspace_bytes(describe(self.settings, _largest(inputs)))

    def get_valid_tactics(self) -> list[int]:
        return []

    # ---- while an engine runs

    def set_tactic(self, tactic: int) -> None:
        """There is one."""

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Allocate what steps of this shape need, with the engine's device current.

        TensorRT calls this at the start of the first run after a shape or an address has changed. It asks that such a
        run is not captured, so the allocation happens outside of captures.
        """
        call = describe(self.settings, _actual(inputs))
        self.kernels.check(call)
        self.kernels.reserve(self._control, call)

    def attach_to_context(self, context: Any) -> TopWSamplePlugin:
        return self.clone()

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        call = describe(self.settings, _actual(input_desc))
        arguments = dict(zip(self.settings.inputs, inputs, strict=True))
        results = dict(zip(self.settings.outputs, outputs, strict=True))
        # Allocates for a caller alone that never called on_shape_change, as a builder that times layers may do.
        control = self.kernels.reserve(self._control, call)
        self.kernels.enqueue(call, arguments, results, control, workspace, stream)

    def get_fields_to_serialize(self) -> Any:
        fields = _plugin_fields(self.settings.to_engine())
        self._written = [fields, trt.PluginFieldCollection(fields)]  # TensorRT borrows their memory
        return self._written[1]


class TopWSampleCreator(trt.IPluginCreatorV3One):
    """Makes plugins for the parser, from a node's attributes, and for engines, from what they kept of them."""

    def __init__(self, kernels: Kernels) -> None:
        trt.IPluginCreatorV3One.__init__(self)
        self.name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
        # What the parser is to hand over; the values are examples. TensorRT keeps the names' addresses.
        self._known = _plugin_fields(NodeSettings(top_m=1, alt_iters=1, metric="uniform").to_fields())
        self.field_names = trt.PluginFieldCollection(self._known)
        self.kernels = kernels

    def create_plugin(self, name: str, fields: Iterable[Any], phase: Any) -> TopWSamplePlugin:
        values = {each.name: _value(each) for each in fields}
        if phase == trt.TensorRTPhase.RUNTIME:
            check_engine(values)
        return TopWSamplePlugin(NodeSettings.from_fields(values), self.kernels)


_creators: list[TopWSampleCreator] = []  # TensorRT keeps addresses of them for the life of the process


def register(kernels: Kernels | None = None) -> None:
    """Add a creator to TensorRT's registry. kernels: by default those of the CUDA library.

    Raises PluginError where that library is absent, or where TensorRT does not take the creator.
    """
    creator = TopWSampleCreator(installed_kernels() if kernels is None else kernels)
    _creators.append(creator)
    trt.get_plugin_registry().register_creator(creator, NAMESPACE)


def _plugin_fields(values: dict[str, int | str]) -> list[Any]:
    """An engine's fields: numbers as int32, texts with a final zero. TensorRT borrows the arrays' memory."""
    made = []
    for name, value in values.items():
        if isinstance(value, str):
            made.append(trt.PluginField(name, value.encode("utf-8") + b"\0", trt.PluginFieldType.CHAR))
        else:
            made.append(trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32))
    return made


def _value(field: Any) -> int | str:
    data = np.asarray(field.data)
    if field.type == trt.PluginFieldType.CHAR:
        return data.astype(np.uint8).tobytes().rstrip(b"\0").decode("utf-8", "replace")
    return int(data[0]) if data.size == 1 else -1


def _largest(tensors: Sequence[Any]) -> list[Tensor]:
    return [Tensor(_NAMES.get(each.desc.type, str(each.desc.type)), tuple(each.max)) for each in tensors]


def _actual(tensors: Sequence[Any]) -> list[Tensor]:
    return [Tensor(_NAMES.get(each.type, str(each.type)), tuple(each.dims)) for each in tensors]
