"""Open an exported graph: a TensorRT engine of it, or a session of onnxruntime on the requested provider.

Graphs that this onnxruntime does not support, or would compute wrongly without an error, are refused. On CUDA,
`GatherBlockQuantized` over a uint8 table reads wrong weights:

- before 1.29 without zero points: it uses 0 where the CPU uses 2 ** (bits - 1);
- up to at least 1.31 if a row ends within a block: it uses scales of other rows.

This exporter avoids both; others may not.
"""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import onnxruntime as ort

from topw_deploy.device_lock import device_lock
from topw_deploy.errors import ManifestError, ParameterError, ProviderError, TensorRTError, one_line
from topw_deploy.folders import map_stream
from topw_deploy.install import major_minor
from topw_deploy.manifest import MODEL_NAME, NATIVE_ATTENTION, DecoderManifest, Lookup, Manifest, ModelFolder
from topw_deploy.plugins import library
from topw_deploy.runtime.inputs import EDIT_INPUTS, MASK_INPUT, RULE_INPUTS
from topw_deploy.runtime.ort import native, providers
from topw_deploy.runtime.ort.device import BufferPool
from topw_deploy.runtime.ort.session import OrtSession, graph_inputs
from topw_deploy.runtime.session import Sampler, Session, SessionOptions
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.row import mask_words
from topw_deploy.tensorrt.run import TensorRTSession
from topw_deploy.tensorrt.stamp import has_engines

ENGINE = "tensorrt"
"""The provider name that prefers an engine; `TensorrtExecutionProvider` always means onnxruntime's provider."""

SAMPLER_INPUTS = (*PARAMETER_NAMES, "uniform", *EDIT_INPUTS, MASK_INPUT, *RULE_INPUTS)
SAMPLER_OUTPUTS = ("next_token", "logprob", "kept", "certified")

_HINT_FOR_GRAPHS = (
    "omit enable_cuda_graph, or export again with --dtype fp16, which leaves no nodes on the CPU, and build the "
    "native sampler with `topw plugins build --cuda`"
)
# This optimizer fuses RotaryEmbedding into GroupQueryAttention on CUDA. It takes ONNX's RotaryEmbedding for that of
# onnxruntime, reads past its inputs and crashes (onnxruntime issue 28604).
_DISABLED_OPTIMIZERS = ["GroupQueryAttentionFusion"]
_COMPILED_OPERATOR = b"EPContext"
_FIRST_WITH_MIDDLE = (1, 29)  # the first version that takes 2 ** (bits - 1) for zero points that are not given


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


class GraphSession(OrtSession):
    """A folder's session, opened with `options` and checked against the manifest.

    Raises ProviderError if the provider is absent, fails to start or leaves nodes that compute to the CPU, or if the
    native sampler is required but unusable. Raises ManifestError if onnxruntime rejects the graph, or the graph differs
    from the manifest. Raises ParameterError if CUDA graphs cannot be captured.
    """

    def __init__(self, folder: ModelFolder[Any], options: SessionOptions) -> None:
        requested = providers.resolve(options.provider, options.allow_fallback)
        wanted = requested if providers.short_name(requested) in providers.available() else providers.CPU
        unused = requested == providers.CPU and options.cuda_graphs
        if unused and options.provider != "auto":
            raise ParameterError("enable_cuda_graph is for provider='cuda', but provider is 'cpu'; omit it.")
        graphs = wanted == providers.CUDA and options.cuda_graphs
        _check_version(folder)
        if graphs:
            _check_can_capture(folder)
        if wanted != providers.CPU:
            refuse_compiled(folder)
        allows_fallback = options.allow_fallback or options.provider == "auto"
        raw, self.sampler, self.why_graph, failure = _open(folder, wanted, options, fallback=allows_fallback)
        self.provider = providers.check_used(wanted, raw, allows_fallback)
        for lookup in folder.manifest.lookups if providers.device_of(self.provider) == "cuda" else ():
            if found := lookup_error_clause(lookup, ort.__version__):
                raise ManifestError(f"{folder.path} looks embeddings up in {found}, or use provider='cpu'.", "provider")
        if self.provider != providers.CPU:
            self.cpu_nodes = providers.assigned_cpu_nodes(raw)
        if not allows_fallback:
            providers.refuse_cpu_nodes(self.cpu_nodes, self.provider)
        self._warn_of_fallback(requested, failure, unused)
        _check_io(folder, raw)
        self.mask_words = mask_words(folder.manifest.sampler.vocab_size)
        attention = folder.manifest.decoder.attention if isinstance(folder.manifest, DecoderManifest) else ""
        is_native = self.sampler == "native" and self.provider == providers.CPU
        self.attends_alone = is_native and attention == NATIVE_ATTENTION
        device = providers.device_of(self.provider), options.device_number
        graphs = graphs and self.provider == providers.CUDA
        super().__init__(raw, device, None if device[0] == "cpu" else BufferPool(device, graphs=graphs))

    def _warn_of_fallback(self, requested: str, failure: str, graphs_unused: bool) -> None:
        doctor, name = "; `topw doctor` shows what is missing", providers.short_name(requested)
        if self.provider != requested:
            if name not in providers.available():
                failure = providers.why_absent(name)
            failure = failure or providers.missing_libraries(requested)
            what = f"{name} could not start, running on {providers.short_name(self.provider)}"
            what += f": {failure}" if failure else doctor
        elif graphs_unused:
            what = "enable_cuda_graph is not used: running on cpu"
        else:
            what = providers.cpu_nodes_clause(self.cpu_nodes, self.provider)
            what += doctor if what else ""
        if what:
            warnings.warn(f"{what}.", RuntimeWarning, stacklevel=5)


def _check_can_capture(folder: ModelFolder[Manifest]) -> None:
    manifest = folder.manifest
    form = manifest.decoder.kv_form if isinstance(manifest, DecoderManifest) else None
    if form != "static":
        what = "a sampler alone" if form is None else f"a {form} cache"
        raise ParameterError(
            f"enable_cuda_graph needs steps of one shape, and {folder.path} has {what}; omit it, or export a "
            "model with --kv static."
        )


def _check_version(folder: ModelFolder[Manifest]) -> None:
    """Raises ManifestError if the graph needs a newer onnxruntime."""
    decoder = folder.manifest.decoder if isinstance(folder.manifest, DecoderManifest) else None
    least = "" if decoder is None else decoder.least_onnxruntime
    if decoder is None or not least or major_minor(ort.__version__) >= major_minor(least):
        return
    other = ", or export with --no-window-cache" if decoder.evicts else ""
    raise ManifestError(
        f"{folder.path} needs the operators of onnxruntime {least}, and this is {ort.__version__}; install onnxruntime "
        f"{least} or newer{other}."
    )


def refuse_compiled(folder: ModelFolder[Manifest]) -> None:
    """Raises ManifestError for EPContext nodes, through which a provider loads compiled code from the folder.

    The CPU's provider has no such operator.
    """
    with folder.open(MODEL_NAME) as stream:
        if not os.fstat(stream.fileno()).st_size:
            return  # cannot be mapped; onnxruntime refuses it
        with map_stream(stream) as graph:
            found = graph.find(_COMPILED_OPERATOR) >= 0
    if found:
        raise ManifestError(
            f"{folder.model} has an {_COMPILED_OPERATOR.decode()} node, which runs code compiled elsewhere; do not use "
            "this folder, or use provider='cpu'.",
            "provider",
        )


def lookup_error_clause(lookup: Lookup, version: str) -> str:
    """A clause that says what onnxruntime `version` computes wrongly on CUDA, with a remedy; "" for nothing."""
    wrongly = f"which onnxruntime {version} reads wrongly on CUDA"
    again = "export the original model again"
    if not lookup.has_zero_points and major_minor(version) < _FIRST_WITH_MIDDLE:
        return f"a quantised table without zero points, {wrongly}; {again}, install 1.29 or newer"
    if lookup.width % lookup.block_size:
        size = f"rows of {lookup.width} weights in blocks of {lookup.block_size}"
        return f"{size}, {wrongly}; {again}"
    return ""


Opened = tuple[ort.InferenceSession, Sampler, str, str]
"""(Session, its sampler, why that is "graph" or "", why the provider asked for failed or "")."""


def _open(folder: ModelFolder[Manifest], wanted: str, options: SessionOptions, *, fallback: bool) -> Opened:
    """Open a session on the provider `wanted`, or, if that fails and `fallback`, on the CPU."""
    settings = options.for_onnxruntime()
    if wanted != providers.CPU:
        providers.record_assignments(settings)
    missing = providers.missing_libraries(wanted)
    chain: list[Any] = [(wanted, dict(options.provider_options or {}))]
    if wanted in providers.FALL_BACK_TO_CUDA and "cuda" in providers.available():
        chain.append((providers.CUDA, {}))
    if wanted != providers.CPU:
        chain.append((providers.CPU, {}))
    try:
        return _open_on(folder, chain, options, settings)
    except (ManifestError, ProviderError):
        raise
    except Exception as error:  # noqa: BLE001  # unrelated classes
        # Open it on the CPU, to find out whether the graph or the provider is at fault.
        raw, sampler, why_graph, _ = _open_on(folder, [(providers.CPU, {})], options, settings)
        why = "; ".join(filter(None, (one_line(error), missing)))
        if fallback:
            return raw, sampler, why_graph, why
        hint = _HINT_FOR_GRAPHS if "graph capture feature" in str(error) else "see `topw doctor`, or use provider='cpu'"
        raise ProviderError(f"{providers.short_name(wanted)} could not open {folder.model} ({why}); {hint}.") from None


def _open_on(
    folder: ModelFolder[Manifest], chain: list[Any], options: SessionOptions, settings: ort.SessionOptions
) -> Opened:
    """Open a session with the native sampler if it can be used, else with the function in the file.

    chain: onnxruntime's providers, the best first.

    Raises ManifestError if the CPU's provider refuses the graph, the errors of other providers, and ProviderError if
    the native sampler is required but unusable.
    """
    provider, number = chain[0][0], options.device_number
    device = providers.device_of(provider)
    found, why, refused = None, "sampler='graph' asks for it", None
    with nullcontext() if device == "cpu" else device_lock((device, number)).opening():
        if options.sampler != "graph":
            found, why = native.operator_library(provider, folder.manifest.sampler.table_form, settings, number)
        if found is not None:
            before = found.assigned_nodes
            try:
                settings.register_custom_ops_library(str(found.path))
                raw = _new_session(folder, chain, settings)
            except Exception as error:  # noqa: BLE001  # unrelated classes
                why, refused = f"onnxruntime does not open it with the native sampler ({one_line(error)})", error
            else:
                if found.assigned_nodes > before:
                    return raw, "native", "", ""
                why = "the graph has no node for the native sampler"
                del raw
        try:
            with library.hide_operators():
                raw = _new_session(folder, chain, settings)
        except Exception as error:  # noqa: BLE001
            cause = refused or error  # the error has another cause, or the model needs the native sampler
            if provider != providers.CPU:
                raise cause from None
            raise ManifestError(
                f"onnxruntime {ort.__version__} refuses {folder.model} ({one_line(cause)}); check the folder with "
                "`topw verify` or export the model again."
            ) from None
    if options.sampler == "native":
        raise ProviderError(
            f"sampler='native' is not available: {why}; see `topw doctor`, or use sampler='auto'.", "sampler"
        )
    return raw, "graph", why, ""


def _new_session(folder: ModelFolder[Manifest], chain: list[Any], options: ort.SessionOptions) -> ort.InferenceSession:
    # enable_fallback prints to stdout and retries on another provider; read_config_from_model lets the file set session
    # options, which can load libraries.
    return ort.InferenceSession(
        folder.model,
        options,
        providers=chain,
        enable_fallback=0,
        read_config_from_model=0,
        disabled_optimizers=_DISABLED_OPTIMIZERS if chain[0][0] != providers.CPU else None,
    )


def _check_io(folder: ModelFolder[Manifest], session: ort.InferenceSession) -> None:
    manifest = folder.manifest
    for what, specs, nodes in (
        ("input", manifest.inputs, graph_inputs(session)),
        ("output", manifest.outputs, session.get_outputs()),
    ):
        stated = {spec.name: f"tensor({spec.dtype})" for spec in specs}
        found = {node.name: node.type for node in nodes}
        for name in sorted(stated.keys() | found.keys()):
            if stated.get(name) != found.get(name):
                has, states = found.get(name, "absent"), stated.get(name, "absent")
                raise ManifestError(
                    f"{what} {name!r} is {has} in model.onnx, but {states} in the manifest: the two do not match; "
                    "export the model again."
                )
    for name in (*SAMPLER_INPUTS, *SAMPLER_OUTPUTS):
        if not any(spec.name == name for spec in (*manifest.inputs, *manifest.outputs)):
            raise ManifestError(
                f"{folder.model} has no {name!r}, so its sampler is not Top-W's; export the model again."
            )
