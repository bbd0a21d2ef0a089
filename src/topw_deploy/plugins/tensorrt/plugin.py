"""The plugin in Python. Imports TensorRT.

A step enqueues only the CUDA library's kernels, so a CUDA graph can capture it and replay it without Python. Tested
with NVIDIA's parser and builder and with kernels emulated on a CPU; never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from topw_deploy.plugins.structs import FLOATS
from topw_deploy.plugins.tensorrt.kernels import PluginKernels, installed_kernels
from topw_deploy.plugins.tensorrt.module import NAME, NAMESPACE, VERSION, tensorrt_module
from topw_deploy.plugins.tensorrt.node import (
    MASK,
    OUTPUT_TYPES,
    NodeAttributes,
    TensorDesc,
    check_engine,
    read_call_shape,
)

trt: Any = tensorrt_module()

_TYPES = {name: getattr(trt, name) for name in (*FLOATS, "int32", "int64", "bool")}
_NAMES = {value: name for name, value in _TYPES.items()}
_FLOATS = tuple(_TYPES[name] for name in FLOATS)
_INTEGERS = {"edit_ids": trt.int64, MASK: trt.int32, "rule": trt.int32}


class TopWSamplePlugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
    """The plugin of a node.

    If a method raises, TensorRT prints the error and fails the build or run. TensorRT clones the plugin for each
    execution context, so concurrent contexts do not share control memory.
    """

    def __init__(self, node: NodeAttributes, kernels: PluginKernels) -> None:
        for base in TopWSamplePlugin.__bases__:
            base.__init__(self)
        self.plugin_name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
        self.num_outputs = len(node.outputs)
        self.node = node
        self.kernels = kernels
        # The types in the graph; float32 until get_output_data_types receives them.
        self.graph_types = {"logits": trt.float32, "table": trt.float32}
        self._control = kernels.control_memory()
        self._serialized: list[Any] = []

    def get_capability_interface(self, kind: Any) -> Any:
        return self

    def clone(self) -> TopWSamplePlugin:
        copy = TopWSamplePlugin(self.node, self.kernels)
        copy.graph_types = dict(self.graph_types)
        return copy

    def destroy(self) -> None:
        """Free the control memory. TensorRT's module keeps references to the object, so it is never collected."""
        self._control.release()

    # ---- while an engine is built

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        given = dict(zip(self.node.inputs, input_types, strict=True))
        self.graph_types = {name: given[name] for name in self.graph_types if name in given}
        return [_TYPES[OUTPUT_TYPES[name]] for name in self.node.outputs]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
        logits, shapes = inputs[0], []
        for name in self.node.outputs:
            shape = trt.DimsExprs(2 if name == "keep_mask" else 1)
            for axis in range(len(shape)):
                shape[axis] = logits[axis]
            shapes.append(shape)
        return shapes

    def supports_format_combination(self, position: int, tensors: Sequence[Any], inputs: int) -> bool:
        """Accept only the graph's types: the builder must not round logits."""
        tensor = tensors[position].desc
        if tensor.format != trt.TensorFormat.LINEAR:
            return False
        if position >= inputs:
            return bool(tensor.type == _TYPES[OUTPUT_TYPES[self.node.outputs[position - inputs]]])
        name = self.node.inputs[position]
        if name in self.graph_types:
            return tensor.type in _FLOATS and tensor.type == self.graph_types[name]
        return bool(tensor.type == _INTEGERS.get(name, trt.float32))

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.kernels.check(read_call_shape(self.node, _largest_specs(inputs)))

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return self.kernels.workspace_bytes(read_call_shape(self.node, _largest_specs(inputs)))

    def get_valid_tactics(self) -> list[int]:
        return []

    # ---- while an engine runs

    def set_tactic(self, tactic: int) -> None:
        """Do nothing: there is only one tactic."""

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Allocate control memory on the current device, which is the engine's.

        TensorRT calls this in the first run after a shape or address changed, and forbids capturing that run.
        """
        call = read_call_shape(self.node, _actual_specs(inputs))
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
        call = read_call_shape(self.node, _actual_specs(input_desc))
        arguments = dict(zip(self.node.inputs, inputs, strict=True))
        results = dict(zip(self.node.outputs, outputs, strict=True))
        # Allocates only if on_shape_change was not called: a builder that times layers does not call it.
        control = self.kernels.reserve(self._control, call)
        self.kernels.enqueue(call, arguments, results, control, workspace, stream)

    def get_fields_to_serialize(self) -> Any:
        fields = _plugin_fields(self.node.engine_fields())
        self._serialized = [fields, trt.PluginFieldCollection(fields)]  # TensorRT borrows their memory
        return self._serialized[1]


class TopWSampleCreator(trt.IPluginCreatorV3One):
    """Creates plugins from a node's attributes (parser) or serialized fields (engine)."""

    def __init__(self, kernels: PluginKernels) -> None:
        trt.IPluginCreatorV3One.__init__(self)
        self.name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
        # Fields for the parser; the values are examples. TensorRT keeps the names' addresses.
        example = NodeAttributes(top_m=1, alt_iters=1, metric="uniform", knn_k=0, with_mass=0, with_keep_mask=0)
        self._example_fields = _plugin_fields(example.attribute_fields())
        self.field_names = trt.PluginFieldCollection(self._example_fields)
        self.kernels = kernels

    def create_plugin(self, name: str, fields: Iterable[Any], phase: Any) -> TopWSamplePlugin:
        values = {each.name: _field_value(each) for each in fields}
        if phase == trt.TensorRTPhase.RUNTIME:
            check_engine(values)
        return TopWSamplePlugin(NodeAttributes.from_fields(values), self.kernels)


_creators: list[TopWSampleCreator] = []  # TensorRT keeps their addresses for the process's life


def register(kernels: PluginKernels | None = None) -> None:
    """Add a creator of plugins to TensorRT's registry.

    kernels: by default `installed_kernels()`, whose errors are raised.
    """
    creator = TopWSampleCreator(installed_kernels() if kernels is None else kernels)
    _creators.append(creator)
    trt.get_plugin_registry().register_creator(creator, NAMESPACE)


def _plugin_fields(values: dict[str, int | str]) -> list[Any]:
    """TensorRT's fields of these values: int32 numbers and zero-terminated strings. TensorRT borrows their memory."""
    fields = []
    for name, value in values.items():
        if isinstance(value, str):
            fields.append(trt.PluginField(name, value.encode("utf-8") + b"\0", trt.PluginFieldType.CHAR))
        else:
            fields.append(trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32))
    return fields


def _field_value(field: Any) -> int | str:
    data = np.asarray(field.data)
    if field.type == trt.PluginFieldType.CHAR:
        return data.astype(np.uint8).tobytes().rstrip(b"\0").decode("utf-8", "replace")
    return int(data[0]) if data.size == 1 else -1


def _largest_specs(tensors: Sequence[Any]) -> list[TensorDesc]:
    return [TensorDesc(_NAMES.get(each.desc.type, str(each.desc.type)), tuple(each.max)) for each in tensors]


def _actual_specs(tensors: Sequence[Any]) -> list[TensorDesc]:
    return [TensorDesc(_NAMES.get(each.type, str(each.type)), tuple(each.dims)) for each in tensors]
