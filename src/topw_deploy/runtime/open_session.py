"""Open a TensorRT engine or an onnxruntime session."""

from __future__ import annotations

import warnings
from dataclasses import replace

from topw_deploy.device_lock import device_lock
from topw_deploy.errors import ParameterError, ProviderError, TensorRTError
from topw_deploy.manifest import DecoderManifest
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.ort import providers
from topw_deploy.runtime.ort.graph_session import GraphSession
from topw_deploy.runtime.protocols import Session
from topw_deploy.runtime.session_options import SessionOptions
from topw_deploy.tensorrt.run import TensorRTSession
from topw_deploy.tensorrt.stamp import has_engines

ENGINE = "tensorrt"
"""The provider name that prefers an engine; `TensorrtExecutionProvider` always means onnxruntime's provider."""


def open_session(folder: ModelFolder[DecoderManifest], options: SessionOptions) -> Session:
    """Open `folder` with `options`.

    Raises GraphSession's errors, and ProviderError if provider is "tensorrt" and there is neither an engine nor
    onnxruntime's provider.
    """
    if options.provider.lower() != ENGINE:
        return GraphSession(folder, options)
    try:
        return _open_engine(folder, options)
    except TensorRTError as error:
        reason = str(error).rstrip(".")
    if ENGINE in providers.available():
        if has_engines(folder.path):
            warnings.warn(
                f"onnxruntime's TensorRT provider runs instead of an engine: {reason}.", RuntimeWarning, stacklevel=3
            )
    elif options.allow_fallback:
        warnings.warn(f"there is no engine to run: {reason}.", RuntimeWarning, stacklevel=3)
    else:
        # Do not say how to build an engine if the reason says so already, or that none can be built without a GPU.
        known = "topw build-engine" in reason or "can be built" in reason
        hint = "" if known else f"; build one with `topw build-engine {folder.path}`"
        raise ProviderError(
            f"there is no engine to run and this onnxruntime has no TensorRT: {reason}{hint}, or use another provider."
        )
    return GraphSession(folder, replace(options, provider=ENGINE))


def _open_engine(folder: ModelFolder[DecoderManifest], options: SessionOptions) -> TensorRTSession:
    device = options.device_number
    session = TensorRTSession(folder.path, folder.manifest, device_lock(("cuda", device)), device)
    names = {name for name in options.provider_options or {} if name != "device_id"}
    given = {"session_options": options.session_options, **options.threads, "provider_options": names or None}
    for name, value in given.items():
        if value is not None:
            raise ParameterError(
                f"{name} is for onnxruntime, and the engine in {folder.path} runs without it; omit it, or use "
                "provider='TensorrtExecutionProvider'.",
                name,
                "provider",
            )
    wanted = {"native": "plugin", "graph": "graph"}.get(options.sampler, session.sampler)
    if wanted != session.sampler:
        raise ProviderError(
            f"sampler is {options.sampler!r}, but the engine was built {'with' if wanted == 'graph' else 'without'} "
            f"the plugin; build it again with `topw build-engine {folder.path} --plugin "
            f"{'none' if wanted == 'graph' else 'auto'}`.",
            "sampler",
        )
    return session
