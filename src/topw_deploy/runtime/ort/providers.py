"""Execution providers: their names, their CUDA libraries, and the nodes that they leave on the CPU.

onnxruntime's providers search libraries only on the system path. `onnxruntime.preload_dlls` finds packages beside
onnxruntime; this module also finds packages elsewhere, such as those of PyTorch in the system's Python. Nothing here
imports torch.

Only arithmetic on shapes and indices belongs on the CPU; any other operator there would transfer tensors in every step.
"""

from __future__ import annotations

import difflib
import importlib.util
import io
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path

import onnxruntime as ort

from topw_deploy import install
from topw_deploy.errors import ProviderError, UnknownProviderError
from topw_deploy.runtime.session import CpuNode

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
_SUFFIX = "ExecutionProvider"
_CHOOSE_ANOTHER = "choose one of those or 'auto'"

# The device whose memory a provider uses; other providers use host memory.
_DEVICES = {CUDA: "cuda", "TensorrtExecutionProvider": "cuda", "NvTensorRTRTXExecutionProvider": "cuda"}
FALL_BACK_TO_CUDA = ("TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")


def short_name(provider: str) -> str:
    """The short name of a provider: "cuda" for "CUDAExecutionProvider"."""
    return provider.removesuffix(_SUFFIX).lower()


def available() -> tuple[str, ...]:
    """The short names of the providers that this onnxruntime was built with, best first."""
    return tuple(short_name(name) for name in ort.get_available_providers())


def resolve(provider: str, allow_fallback: bool = False) -> str:
    """The full name of a provider. provider: "auto" (CUDA if built in, else CPU), a short or a full name.

    Raises UnknownProviderError for an unknown name, and ProviderError if this onnxruntime lacks the provider and
    `allow_fallback` is False.
    """
    built = ort.get_available_providers()
    if provider == "auto":
        return CUDA if CUDA in built else CPU
    wanted = provider.lower().removesuffix(_SUFFIX.lower()).replace("_", "")  # nv_tensorrt_rtx
    known = {short_name(name): name for name in ort.get_all_providers()}
    for name in built:
        if short_name(name) == wanted:
            return name
    if allow_fallback and wanted in known:
        return known[wanted]
    if wanted in known:
        raise ProviderError(f"{why_absent(provider)}.")
    near = ["cuda"] if "gpu" in wanted else difflib.get_close_matches(wanted, (*available(), "cuda", "tensorrt"), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownProviderError(
        f"provider is {provider!r}, which is not an execution provider: {hint}this onnxruntime has "
        f"{', '.join(available())}; {_CHOOSE_ANOTHER}.",
        "provider",
    )


def why_absent(provider: str) -> str:
    """A clause that says that onnxruntime lacks `provider`, with the remedy."""
    remedy = _CHOOSE_ANOTHER
    if provider.lower().removesuffix(_SUFFIX.lower()) in ("cuda", "tensorrt"):
        commands = f"{install.pip_command('uninstall')} -y onnxruntime && {install.install_command('gpu')}"
        remedy = f"for NVIDIA devices run: {commands}"
    what = f"this onnxruntime {ort.__version__} was built without {provider!r}"
    return f"{what}: it has {', '.join(available())}; {remedy}"


def device_of(provider: str) -> str:
    """onnxruntime's name of the device whose memory `provider`, a full name, uses."""
    return _DEVICES.get(provider, "cpu")


def missing_libraries(provider: str) -> str:
    """Load the libraries of `provider`. Returns a clause that names the missing ones; "" if none is missing."""
    return preload_libraries() if device_of(provider) == "cuda" else ""


def check_used(wanted: str, session: ort.InferenceSession, allow_fallback: bool) -> str:
    """The provider that a session uses: onnxruntime drops one that fails to start without an error.

    Raises ProviderError if that is not `wanted` and `allow_fallback` is False.
    """
    used = session.get_providers()
    if wanted in used:
        return wanted
    if not allow_fallback:
        missing = missing_libraries(wanted)
        raise ProviderError(
            f"provider is {short_name(wanted)}, but onnxruntime could not start it and would run on "
            f"{', '.join(map(short_name, used))}{f' ({missing})' if missing else ''}; see `topw doctor`, or pass "
            "allow_fallback=True to accept that.",
            "allow_fallback",
        )
    return str(used[0])


# ---- CUDA's and cuDNN's libraries

_MISSING_LIBRARY = re.compile(r"Failed to load (\S+?):")
_lock = threading.Lock()
_first_result: list[str] = []  # of `preload_libraries`


def preload_libraries() -> str:
    """Load the libraries once per process. Returns a clause that names the missing ones; "" if none is missing.

    A missing library is not an error: CUDA may be linked statically or have another name on the system path.
    """
    with _lock:
        if not _first_result:
            output = _capture_output(ort.preload_dlls)
            for folder in _other_library_folders() if output else ():
                output = _capture_output(partial(ort.preload_dlls, directory=str(folder)))
            _first_result.append(_missing_clause(output))
        return _first_result[0]


def _capture_output(load: Callable[[], None]) -> str:
    """What `load` prints, and the error that it raises."""
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            load()
    except Exception as error:  # noqa: BLE001  # reported if the provider does not start
        output.write(f"{type(error).__name__}: {error}")
    return output.getvalue()


def _other_library_folders() -> list[Path]:
    """The library folders of packages that are not beside onnxruntime; cuDNN's after those of its dependencies."""
    spec = importlib.util.find_spec("nvidia")
    beside = Path(ort.__file__).parents[1] / "nvidia"
    roots = [Path(root) for root in (spec.submodule_search_locations or () if spec else ()) if Path(root) != beside]
    folders = [folder for root in roots for folder in sorted(root.glob("*/lib")) if any(folder.glob("libcu*"))]
    return sorted(folders, key=lambda folder: "cudnn" in folder.parts)


def _missing_clause(output: str) -> str:
    """A clause that names the libraries that `output` reports missing, or else the output, shortened."""
    names = list(dict.fromkeys(Path(path).name for path in _MISSING_LIBRARY.findall(output)))
    if names:
        return f"onnxruntime found no {', '.join(names)}; to install them, run: {install.install_command('gpu')}"
    return " ".join(output.split())[:300]


# ---- nodes on the CPU

_RECORD_ASSIGNMENTS = "session.record_ep_graph_assignment_info"

# Arithmetic on shapes and indices. Every device provider has these operators, so their place on the CPU is intended.
# fmt: off
_SHAPE_OPERATORS = frozenset((
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Floor",
    "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg",
    "Not", "Or", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Shape", "Size", "Slice",
    "Split", "Squeeze", "Sub", "Unsqueeze", "Where",
))
# fmt: on

_HINTS = {
    "GroupQueryAttention": "onnxruntime has it for CUDA in float16 and bfloat16: export with --dtype fp16, or, for "
    "int4 and int8, with --compute-dtype fp16",
    "TopWSample": "the library of the native sampler does not support this provider: see `topw doctor`",
}


def record_assignments(options: ort.SessionOptions) -> None:
    """Make sessions of `options` record the provider of each node."""
    with suppress(Exception):  # missing entry
        if options.get_session_config_entry(_RECORD_ASSIGNMENTS) == "1":
            return
    options.add_session_config_entry(_RECORD_ASSIGNMENTS, "1")


def assigned_cpu_nodes(session: ort.InferenceSession) -> tuple[CpuNode, ...]:
    """The nodes of a session on the CPU, without those of subgraphs. Call `record_assignments` before opening it."""
    return tuple(
        CpuNode(node.name, node.op_type, bool(node.domain) or node.op_type not in _SHAPE_OPERATORS)
        for group in session.get_provider_graph_assignment_info()
        if group.ep_name == CPU
        for node in group.get_nodes()
    )


def cpu_nodes_clause(nodes: Sequence[CpuNode], provider: str) -> str:
    """A clause that names the nodes that compute on the CPU; "" if none does."""
    computing = [node for node in nodes if node.computes]
    if not computing:
        return ""
    counts = Counter(node.operator for node in computing)
    kinds = ", ".join(f"{count} {operator}" for operator, count in counts.most_common(6))
    names = ", ".join(node.name or "unnamed" for node in computing[:3])
    hints = "; ".join(_HINTS[operator] for operator in counts if operator in _HINTS)
    more = ", ..." if len(computing) > 3 else ""
    clause = f"{short_name(provider)} leaves {len(computing)} nodes on the CPU: {kinds} ({names}{more})"
    return f"{clause}; {hints}" if hints else clause


def refuse_cpu_nodes(nodes: Sequence[CpuNode], provider: str) -> None:
    """Raises ProviderError if one of the nodes computes on the CPU."""
    clause = cpu_nodes_clause(nodes, provider)
    if clause:
        raise ProviderError(
            f"{clause}; pass allow_fallback=True to accept that, or use provider='cpu'.", "allow_fallback", "provider"
        )
