"""An open onnxruntime session, with its bindings, runs and memory. On the host, runs use numpy arrays in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import onnxruntime as ort

from topw_deploy.errors import GenerationError, one_line
from topw_deploy.runtime.cache.buffers import HostMemory
from topw_deploy.runtime.ort import providers
from topw_deploy.runtime.session import CpuNode, Memory, Sampler


class OrtSession:
    """The protocol `Session` over an open InferenceSession.

    device: (kind, number) of the device that holds the tensors.
    buffers: the device's `device.BufferPool`, which makes bindings and memory there; None for the host.
    with_defaults: the inputs that have a default value.
    """

    provider = providers.CPU
    sampler: Sampler = "graph"
    why_graph = ""
    cpu_nodes: tuple[CpuNode, ...] = ()
    most_rows: int | None = None
    most_columns: int | None = None
    most_edits: int | None = None
    attends_alone = False
    mask_words = 0
    _buffers: Any = None

    def __init__(self, raw: ort.InferenceSession, device: tuple[str, int] = ("cpu", 0), buffers: Any = None) -> None:
        self.raw, self.device, self._buffers = raw, device, buffers
        nodes = graph_inputs(raw)
        self.inputs = frozenset(node.name for node in nodes)
        self.with_defaults = frozenset(node.name for node in raw.get_overridable_initializers())
        self.outputs = tuple(node.name for node in raw.get_outputs())
        widths = {node.name: node.shape[1] for node in nodes if node.name in ("edit_ids", "allowed")}
        slots = widths.get("edit_ids")
        self.fixed_edits = slots if isinstance(slots, int) else None
        self.always_masked = isinstance(widths.get("allowed"), int)

    def bind(self) -> HostBinding:
        return HostBinding(self) if self._buffers is None else self._buffers.bind(self)

    def memory(self, size: int) -> Memory:
        return HostMemory(size) if self._buffers is None else self._buffers.memory(size)

    def run(self, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run once on host arrays."""
        with nullcontext() if self._buffers is None else self._buffers.lock.shared_use:
            found: list[np.ndarray] = self.raw.run(outputs, feeds)
        return found

    def __del__(self) -> None:
        """Close the session under the lock, because closing frees device memory."""
        if self._buffers is not None:
            with self._buffers.lock.shared_use:
                del self.raw


class HostBinding:
    """onnxruntime's IO binding. It is used without onnxruntime's Python wrapper, which would double the cost."""

    def __init__(self, session: OrtSession) -> None:
        self._io = ort.SessionIOBinding(session.raw._sess)
        self._run = session.raw._sess.run_with_iobinding
        self._device = ort.OrtDevice.make(*session.device)._get_c_device()
        self._with_defaults = session.with_defaults
        self._options: ort.RunOptions | None = None
        self._arrays: dict[str, np.ndarray] = {}
        self._bound_outputs: list[str] = []
        self.bind_value = self._io.bind_ortvalue_input  # of (name, raw OrtValue)
        self.outputs = self._io.get_outputs  # the last run's outputs, in the order in which they were bound
        self._session = session  # assigned and so released last: that frees device memory

    def bind_array(self, name: str, array: np.ndarray) -> None:
        self._arrays[name] = array
        if name in self._with_defaults:  # which bind_input does not find
            self._io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array)._ortvalue)
        else:
            self._io.bind_input(name, array)

    def bind_changing(self, name: str, array: np.ndarray) -> None:
        self.bind_array(name, array)

    def bind_on_host(self, name: str, array: np.ndarray) -> None:
        self.bind_array(name, array)

    def refresh(self, name: str) -> None:
        """Do nothing: runs read the array itself."""

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        self._bound_outputs.append(target)
        self._io.bind_input(source, self._device, element_type, shape, pointer)
        self._io.bind_output(target, self._device, element_type, shape, pointer)

    def bind_result(self, name: str, array: np.ndarray) -> None:
        self._arrays[name] = array
        self._bound_outputs.append(name)
        self._io.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array)._ortvalue)

    def bind_input_memory(self, name: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        """Bind session memory as an input only. The memory must stay alive."""
        self._io.bind_input(name, self._device, element_type, shape, pointer)

    def bind_fresh(self, name: str) -> int:
        """Make the next run allocate output `name`. Returns its index in `outputs`."""
        self._bound_outputs.append(name)
        self._io.bind_output(name, self._device)
        return len(self._bound_outputs) - 1

    def bind_fresh_again(self, name: str) -> None:
        """Make the next run allocate output `name` again."""
        self._io.bind_output(name, self._device)

    def new_sibling(self) -> HostBinding:
        return HostBinding(self._session)

    def close(self) -> None:
        """Do nothing: a generation owns only the arrays."""

    def run(self, step: int | None = None) -> None:
        try:
            self._run(self._io, self._options)
        except Exception as error:  # noqa: BLE001  # unrelated classes
            where = "in the prompt" if step is None else f"at step {step}"
            raise GenerationError(f"onnxruntime failed {where}: {one_line(error)}") from None


def graph_inputs(session: ort.InferenceSession) -> list[ort.NodeArg]:
    """All inputs of a session's graph: onnxruntime lists inputs with a default separately."""
    return [*session.get_inputs(), *session.get_overridable_initializers()]
