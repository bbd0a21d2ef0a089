"""What the loop and the caches need from a session: Implemented in `ort/` and `topw_deploy.tensorrt.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

Sampler: TypeAlias = Literal["native", "plugin", "graph"]
"""What runs the sampler's node: onnxruntime's native operator, TensorRT's plugin, or the function in the file."""


@dataclass(frozen=True)
class CpuNode:
    """A node that a device's provider left to the CPU. computes: more than arithmetic on shapes and indices."""

    name: str
    operator: str
    computes: bool


class Memory(Protocol):
    """`size` bytes at address `pointer`, zero at first, where the session computes."""

    size: int
    pointer: int

    def clear(self, size: int) -> None:
        """Zero at least the first `size` bytes."""

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        """Call `edit` with the bytes, uint8 [size]; device memory is copied to the host and back."""


class Binding(Protocol):
    """The inputs and outputs of one generation's runs. Host arrays must stay alive and be contiguous."""

    def bind_array(self, name: str, array: np.ndarray) -> None:
        """Bind a host array as an input; call `refresh` after changing it."""

    def bind_changing(self, name: str, array: np.ndarray) -> None:
        """Bind an input that every run reads anew."""

    def bind_on_host(self, name: str, array: np.ndarray) -> None:
        """Bind an input that the graph reads on the host."""

    def refresh(self, name: str) -> None:
        """Make runs see changes to the array bound as `name`."""

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        """Bind the session's memory as input `source` and output `target`; it must stay alive."""

    def bind_result(self, name: str, array: np.ndarray) -> None:
        """Have runs write output `name` into an array of its shape."""

    def another(self) -> Binding:
        """An empty binding for other runs of this generation, not concurrent ones; `close` closes both."""

    def run(self, step: int | None = None) -> None:
        """Run the graph once and wait for its results. step: None for a chunk of a prompt whose results are not read.

        Raises GenerationError with the runtime's message.
        """

    def close(self) -> None:
        """Release this generation's resources."""


class Session(Protocol):
    """An open model.

    provider: onnxruntime's name of the execution provider, or "tensorrt" for an engine.
    why_graph: why `sampler` is "graph", as a clause.
    cpu_nodes: nodes that a device's provider left to the CPU.
    inputs, outputs: the graph's names.
    fixed_edits: slots of the edit inputs where the graph fixes their number.
    most_rows, most_columns, most_edits: bounds on rows, tokens of a row in one run, and edits of a row; None: no bound.
    """

    provider: str
    sampler: Sampler
    why_graph: str
    cpu_nodes: tuple[CpuNode, ...]
    inputs: frozenset[str]
    outputs: tuple[str, ...]
    fixed_edits: int | None
    most_rows: int | None
    most_columns: int | None
    most_edits: int | None

    def bind(self) -> Binding:
        """New bindings; generations may run concurrently."""

    def memory(self, size: int) -> Memory:
        """Zeroed, aligned memory where the session computes."""

    def settle(self, run: Callable[[], object]) -> None:
        """Check what only a run shows. Call it once, before all other runs; `run` makes a run of one token.

        Raises ProviderError if another provider than the requested one computes nodes.
        """
