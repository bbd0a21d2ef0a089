"""Interfaces of sessions, implemented in `ort/` and `topw_deploy.tensorrt.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

Sampler: TypeAlias = Literal["native", "plugin", "graph"]
"""What computes the sampler: onnxruntime's native operator, TensorRT's plugin, or the function in the file."""


@dataclass(frozen=True)
class CpuNode:
    """A node that runs on the CPU although another provider was requested.

    operator: its type.
    computes: whether it does more than arithmetic on shapes and indices.
    """

    name: str
    operator: str
    computes: bool


class Memory(Protocol):
    """`size` bytes at address `pointer`, initially zero, on the session's device."""

    size: int
    pointer: int

    def clear(self, size: int) -> None:
        """Zero at least the first `size` bytes."""

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        """Call `edit` with the bytes, uint8 [size], to change them. Device memory is copied to the host and back."""


class Binding(Protocol):
    """The inputs and outputs of one generation's runs. Host arrays must be contiguous and stay alive."""

    def bind_array(self, name: str, array: np.ndarray) -> None:
        """Bind a host array as an input; call `refresh` after changing it."""

    def bind_changing(self, name: str, array: np.ndarray) -> None:
        """Bind an input that every run reads again."""

    def bind_on_host(self, name: str, array: np.ndarray) -> None:
        """Bind an input that the graph reads on the host."""

    def refresh(self, name: str) -> None:
        """Make the next run read a changed array of `bind_array` again."""

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        """Bind session memory as input `source` and output `target`. The memory must stay alive."""

    def bind_result(self, name: str, array: np.ndarray) -> None:
        """Make runs write output `name` to `array`."""

    def new_sibling(self) -> Binding:
        """A new, empty binding for other runs of this generation, never concurrent; `close` closes both."""

    def run(self, step: int | None = None) -> None:
        """Run the graph and wait.

        step: the step's number; None for a chunk of a prompt, whose results are not used.

        Raises GenerationError with the runtime's message.
        """

    def close(self) -> None:
        """Release resources."""


class Session(Protocol):
    """An open model.

    provider: onnxruntime's provider name, or "tensorrt" for an engine.
    why_graph: why `sampler` is "graph", as a clause.
    cpu_nodes: see `CpuNode`.
    inputs, outputs: names of the graph's inputs and outputs.
    fixed_edits: the graph's fixed number of edit slots, or None.
    mask_words: 32-bit words of a row's mask, ceil(V / 32).
    always_masked: whether every run takes all words; otherwise a run without a masked row takes none.
    most_rows, most_columns, most_edits: maximum rows, tokens per row and run, and edits per row; None: no limit.
    """

    provider: str
    sampler: Sampler
    why_graph: str
    cpu_nodes: tuple[CpuNode, ...]
    inputs: frozenset[str]
    outputs: tuple[str, ...]
    fixed_edits: int | None
    mask_words: int
    always_masked: bool
    most_rows: int | None
    most_columns: int | None
    most_edits: int | None

    def bind(self) -> Binding:
        """A new binding for one generation; generations may be concurrent."""

    def memory(self, size: int) -> Memory:
        """Zeroed, aligned memory on the session's device."""

    def check_with_run(self, run: Callable[[], object]) -> None:
        """Make the checks that need a run. Call this once, before other runs.

        run: function that runs the graph for one token.

        Raises ProviderError if another provider than the requested one computes nodes.
        """
