"""Names, selection and checks of execution providers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import onnxruntime as ort

from topw_deploy import install
from topw_deploy.errors import ProviderError, UnknownProviderError
from topw_deploy.runtime.ort import cuda_libraries

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
_SUFFIX = "ExecutionProvider"
_CHOOSE_ANOTHER = "choose one of those or 'auto'"

# The device whose memory a provider uses; other providers use host memory.
_DEVICES = {CUDA: "cuda", "TensorrtExecutionProvider": "cuda", "NvTensorRTRTXExecutionProvider": "cuda"}
_FALL_BACK_TO_CUDA = ("TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")


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
    near = difflib.get_close_matches(wanted, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownProviderError(
        f"provider is {provider!r}, which is not an execution provider: {hint}this onnxruntime has "
        f"{', '.join(available())}; {_CHOOSE_ANOTHER}.",
        "provider",
    )


def why_absent(provider: str) -> str:
    """A clause that says that onnxruntime lacks `provider`, with the remedy."""
    remedy = _remedy(provider.lower().removesuffix(_SUFFIX.lower()))
    what = f"this onnxruntime {ort.__version__} was built without {provider!r}"
    return f"{what}: it has {', '.join(available())}; {remedy}"


def _remedy(wanted: str) -> str:
    if wanted in ("cuda", "tensorrt"):
        commands = f"{install.pip_command('uninstall')} -y onnxruntime && {install.install_command('gpu')}"
        return f"for NVIDIA devices run: {commands}"
    return _CHOOSE_ANOTHER


def session_providers(name: str, options: Mapping[str, Any] | None) -> list[Any]:
    """The argument `providers` of an InferenceSession: the provider `name` with `options`, and its fallbacks."""
    chain: list[Any] = [(name, dict(options or {}))]
    if name in _FALL_BACK_TO_CUDA and CUDA in ort.get_available_providers():
        chain.append((CUDA, {}))
    if name != CPU:
        chain.append((CPU, {}))
    return chain


def device_of(provider: str) -> str:
    """onnxruntime's name of the device whose memory `provider`, a full name, uses."""
    return _DEVICES.get(provider, "cpu")


def missing_libraries(provider: str) -> str:
    """Load the libraries of `provider`. Returns a clause that names the missing ones; "" if none is missing."""
    return cuda_libraries.preload_libraries() if device_of(provider) == "cuda" else ""


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
