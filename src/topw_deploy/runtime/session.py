"""An open model as the runtime uses it: sessions, bindings and memory, and the options that open them.

Implemented in `ort/` and `topw_deploy.tensorrt.run`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
import onnxruntime as ort

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import check_choice

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
    attends_alone: whether native attention computes each row's tokens as if each were alone, in any batch and chunk.
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
    attends_alone: bool
    mask_words: int
    always_masked: bool
    most_rows: int | None
    most_columns: int | None
    most_edits: int | None

    def bind(self) -> Binding:
        """A new binding for one generation; generations may be concurrent."""

    def memory(self, size: int) -> Memory:
        """Zeroed, aligned memory on the session's device."""


SAMPLERS = ("auto", "native", "graph")
_MOST_THREADS = 1024  # onnxruntime has no limit and would hang
_FALSE_VALUES = ("0", "false")  # values that onnxruntime reads as false
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Options of a session. Raises ParameterError for an invalid value.

    provider: "auto", a short name such as "cuda", or onnxruntime's full name. "tensorrt" runs the folder's engine if
        one fits this machine, else onnxruntime's provider.
    provider_options: see onnxruntime. "enable_cuda_graph" captures each step shape once and replays it; needs the
        "static" cache form.
    session_options: onnxruntime's own options; the thread counts and the native operator are added to them. One object
        may open several sessions.
    intra_op_num_threads, inter_op_num_threads: at most 1024; 0 lets onnxruntime choose.
    allow_fallback: whether to accept another provider, and nodes on the CPU.
    sampler: "auto" (native if possible), "native" or "graph".
    """

    provider: str = "auto"
    provider_options: Mapping[str, Any] | None = None
    session_options: ort.SessionOptions | None = None
    intra_op_num_threads: int | None = None
    inter_op_num_threads: int | None = None
    allow_fallback: bool = False
    sampler: str = "auto"

    def __post_init__(self) -> None:
        _check_provider(self.provider, self.provider_options)
        check_choice("sampler", self.sampler, SAMPLERS)
        given = self.session_options
        if given is not None and not isinstance(given, ort.SessionOptions):
            raise ParameterError(
                f"session_options is a {type(given).__name__}, but must be an onnxruntime.SessionOptions."
            )
        for name, value in self.threads.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_THREADS:
                raise ParameterError(
                    f"{name} is {value!r}, but must be an integer in [0, {_MOST_THREADS}] (0: onnxruntime's choice).",
                    name,
                )

    @property
    def threads(self) -> dict[str, int]:
        """Thread counts by onnxruntime's names."""
        names = "intra_op_num_threads", "inter_op_num_threads"
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def device_number(self) -> int:
        """The number of the GPU."""
        return int((self.provider_options or {}).get("device_id", 0))

    @property
    def cuda_graphs(self) -> bool:
        """Whether the provider options ask for CUDA graphs."""
        return str((self.provider_options or {}).get("enable_cuda_graph", "0")).lower() not in _FALSE_VALUES

    def for_onnxruntime(self) -> ort.SessionOptions:
        """onnxruntime's options: the caller's object, or a new one, with the thread counts."""
        options = self.session_options
        if options is None:
            options = ort.SessionOptions()
            options.log_severity_level = 3  # hide constant folding warnings
        for name, value in self.threads.items():
            setattr(options, name, value)
        return options


class SessionKeywords(TypedDict, total=False):
    """The fields of `SessionOptions`, as keyword arguments."""

    provider: str
    provider_options: Mapping[str, Any] | None
    session_options: ort.SessionOptions | None
    intra_op_num_threads: int | None
    inter_op_num_threads: int | None
    allow_fallback: bool
    sampler: str


def takes_session_options(method: Method) -> Method:
    """Show the fields of `SessionOptions`, with their defaults, in the signature of a method with **SessionKeywords.

    `help` and shells read the signature. Type checkers read the annotation.
    """
    own = inspect.signature(method)
    shown = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    options = inspect.signature(SessionOptions).parameters.values()
    vars(method)["__signature__"] = own.replace(parameters=[*shown, *options])
    return method


def _check_provider(provider: object, options: object) -> None:
    if not isinstance(provider, str):
        raise ParameterError(
            f"provider is {provider!r}, but must be a name such as 'auto', 'cpu', 'cuda', 'tensorrt'.", "provider"
        )
    if options is None:
        return
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ParameterError(
            f"provider_options is {options!r:.60}, but must be a mapping from onnxruntime's names, like "
            "{'device_id': 0}."
        )
    device = str(options.get("device_id", 0))
    if not device.isdecimal():
        raise ParameterError(f"device_id is {device!r}, but must be the number of a GPU, from 0.")
