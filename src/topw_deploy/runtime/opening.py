"""What computes a model: a TensorRT engine of its folder, or onnxruntime."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from topw_deploy.errors import EngineError, ParameterError, ProviderError
from topw_deploy.runtime import native, providers
from topw_deploy.runtime.face import Session
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.session import GraphSession
from topw_deploy.runtime.turns import turns_of
from topw_deploy.tensorrt.engines import has_engines
from topw_deploy.tensorrt.run.session import EngineSession

ENGINE = "tensorrt"
"""The short name that means an engine first; `TensorrtExecutionProvider` always means onnxruntime's provider."""


def open_session(folder: ModelFolder, *, provider: str, allow_fallback: bool, **options: Any) -> Session:
    """The session for `provider`. options: those of GraphSession.

    "tensorrt" is an engine of the folder that fits this machine, else onnxruntime's provider of that name.
    Raises what GraphSession does, and ProviderError where there is neither.
    """
    providers.check_options(provider, options.get("provider_options"))
    if provider.lower() != ENGINE:
        return GraphSession(folder, provider=provider, allow_fallback=allow_fallback, **options)
    try:
        return _engine(folder, **options)
    except EngineError as error:
        reason = str(error).rstrip(".")
    if ENGINE in providers.available():
        if has_engines(folder.path):
            warnings.warn(f"onnxruntime's TensorRT runs instead of an engine: {reason}.", RuntimeWarning, stacklevel=3)
    elif allow_fallback:
        warnings.warn(f"there is no engine to run: {reason}.", RuntimeWarning, stacklevel=3)
    else:
        # Without a GPU there is nothing to build, and advice that is there already is not given twice.
        known = "topw build-engine" in reason or "can be built" in reason
        hint = "" if known else f"; build one with `topw build-engine {folder.path}`"
        raise ProviderError(
            f"there is no engine to run and this onnxruntime has no TensorRT: {reason}{hint}, or use another provider."
        )
    return GraphSession(folder, provider=ENGINE, allow_fallback=allow_fallback, **options)


def _engine(
    folder: ModelFolder,
    *,
    sampler: str = "auto",
    provider_options: Mapping[str, Any] | None = None,
    session_options: Any = None,
    intra_op_num_threads: int | None = None,
    inter_op_num_threads: int | None = None,
) -> EngineSession:
    native.check_choice(sampler)
    device = int((provider_options or {}).get("device_id", 0))
    session = EngineSession(folder.path, folder.manifest, turns_of(("cuda", device)), device)
    theirs = {
        "session_options": session_options,
        "intra_op_num_threads": intra_op_num_threads,
        "inter_op_num_threads": inter_op_num_threads,
        "provider_options": {name for name in provider_options or {} if name != "device_id"} or None,
    }
    for name, value in theirs.items():
        if value is not None:
            raise ParameterError(
                f"{name} is for onnxruntime, and the engine in {folder.path} runs without it; leave it out, or use "
                "provider='TensorrtExecutionProvider'.",
                name,
                "provider",
            )
    wanted = {"native": "plugin", "graph": "graph"}.get(sampler, session.sampler)
    if wanted != session.sampler:
        raise ProviderError(
            f"sampler is {sampler!r}, but the engine was built {'with' if wanted == 'graph' else 'without'} the "
            f"plugin; build it again with `topw build-engine {folder.path} --plugin "
            f"{'none' if wanted == 'graph' else 'python'}`.",
            "sampler",
        )
    return session
