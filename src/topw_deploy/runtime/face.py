"""What the loop, the caches and the record ask of whatever computes a model: onnxruntime (session.py) or an engine of
TensorRT (tensorrt/session.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np

from topw_deploy.runtime.placement import CpuNode

Sampler: TypeAlias = Literal["native", "plugin", "graph"]
"""What answers the sampler's node: onnxruntime's native operator, TensorRT's plugin, or the function in the file."""


class Memory(Protocol):
    """`size` bytes at `pointer`, zero at first, where the session computes."""

    size: int
    pointer: int

    def clear(self, size: int) -> None:
        """Zero at least the first `size` bytes."""

    def change(self, edit: Callable[[np.ndarray], None]) -> None:
        """Let `edit` write into the bytes, uint8 [size]; those of a device come to the host and go back."""


class Binding(Protocol):
    """The inputs and outputs of one generation's runs, by name. To be closed.

    Host arrays are read, and written, where they are: they must stay alive, and contiguous.
    """

    def bind_array(self, name: str, array: np.ndarray) -> None:
        """Bind a host array as an input. What is written into it later counts after `refresh`, if not sooner."""

    def bind_changing(self, name: str, array: np.ndarray) -> None:
        """Bind a host array as an input; every run sees what it holds then."""

    def bind_on_host(self, name: str, array: np.ndarray) -> None:
        """Bind a host array as an input that the graph reads on the host, wherever it computes."""

    def refresh(self, name: str) -> None:
        """Make the graph see what was written into the bound array of `name` since it was bound."""

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        """Bind memory of the session's device as input `source` and as output `target` at once; it must stay alive."""

    def bind_result(self, name: str, array: np.ndarray) -> None:
        """Have every run write output `name` into this host array of the right shape."""

    def another(self) -> Binding:
        """One with nothing bound, for other runs of the same generation, never at the same time; closed with this."""

    def run(self, step: int | None = None) -> None:
        """Run the graph once and wait for its results. `step` None: a piece of a prompt, whose results nobody reads.

        Raises GenerationError with the words of what computes."""

    def close(self) -> None:
        """Give back what is kept for this generation alone. `run` must not be called again."""


class Session(Protocol):
    """A model that is open.

    provider: in the words of runtime/providers.py. why_graph: why `sampler` is "graph", a clause. cpu_nodes: the nodes
    that another provider than the CPU's left to it. inputs, outputs: the graph's names. fixed_edits: slots of the edit
    inputs where the graph fixes them. most_rows, most_columns, most_edits: bounds on rows, tokens of a row in one run,
    and edits of a row; None for no bound of its own.
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
        """New bindings: what one generation owns, so that several may run on one session at once."""

    def memory(self, size: int) -> Memory:
        """Zeroed memory where the session computes, aligned for it."""

    def settle(self, run: Callable[[], object]) -> None:
        """Check what only a run shows; `run` makes one, of one token. To be called once, before all other runs.

        Raises ProviderError for nodes that another provider computes than the one that was asked for."""
