"""Options for opening a session: their check, and the keyword arguments of methods that take them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import onnxruntime as ort

from topw_deploy.errors import ParameterError

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
        if self.sampler not in SAMPLERS:
            raise ParameterError(f"sampler is {self.sampler!r}, but must be one of {', '.join(SAMPLERS)}.", "sampler")
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
        counts = {
            "intra_op_num_threads": self.intra_op_num_threads,
            "inter_op_num_threads": self.inter_op_num_threads,
        }
        return {name: value for name, value in counts.items() if value is not None}

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
