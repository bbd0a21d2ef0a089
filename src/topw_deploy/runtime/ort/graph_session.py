"""Open an exported graph: a TensorRT engine of it, or a session of onnxruntime on the requested provider."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import onnxruntime as ort

from topw_deploy.device_lock import device_lock
from topw_deploy.errors import ManifestError, ParameterError, ProviderError, TensorRTError, one_line
from topw_deploy.manifest import DecoderManifest, Manifest, ModelFolder, TensorSpec
from topw_deploy.runtime.inputs import EDIT_INPUTS, MASK_INPUT, RULE_INPUTS
from topw_deploy.runtime.ort import graph_checks, native, providers
from topw_deploy.runtime.ort.device import BufferPool
from topw_deploy.runtime.ort.session import OrtSession, graph_inputs
from topw_deploy.runtime.session import Session, SessionOptions
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
        settings = options.for_onnxruntime()
        requested = providers.resolve(options.provider, options.allow_fallback)
        wanted = requested if providers.short_name(requested) in providers.available() else providers.CPU
        unused = requested == providers.CPU and options.cuda_graphs
        if unused and options.provider != "auto":
            raise ParameterError("enable_cuda_graph is for provider='cuda', but provider is 'cpu'; omit it.")
        graphs = wanted == providers.CUDA and options.cuda_graphs
        if graphs:
            _check_can_capture(folder)
        graph_checks.check_version(folder)
        if wanted != providers.CPU:
            graph_checks.refuse_compiled(folder)
            providers.record_assignments(settings)
        allows_fallback = options.allow_fallback or options.provider == "auto"
        opened, failure = _open(folder, wanted, options, settings, fallback=allows_fallback)
        self.sampler, self.why_graph = opened.sampler, opened.why_graph
        self.provider = providers.check_used(wanted, opened.raw, allows_fallback)
        graph_checks.check_lookups(folder, self.provider)
        if self.provider != providers.CPU:
            self.cpu_nodes = providers.assigned_cpu_nodes(opened.raw)
        if not allows_fallback:
            providers.refuse_cpu_nodes(self.cpu_nodes, self.provider)
        self._warn_of_fallback(requested, failure, unused)
        _check_io(folder, opened.raw)
        self.mask_words = mask_words(folder.manifest.sampler.vocab_size)
        device = providers.device_of(self.provider), options.device_number
        graphs = graphs and self.provider == providers.CUDA
        super().__init__(opened.raw, device, None if device[0] == "cpu" else BufferPool(device, graphs=graphs))

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
        what = "a sampler alone" if form is None else f"a cache of the form {form!r}"
        raise ParameterError(
            f"enable_cuda_graph needs steps of one shape, and {folder.path} has {what}; omit it, or export a "
            "model with --kv static."
        )


def _open(
    folder: ModelFolder[Manifest],
    wanted: str,
    options: SessionOptions,
    settings: ort.SessionOptions,
    *,
    fallback: bool,
) -> tuple[native.OpenedSession, str]:
    """Open a session on the provider `wanted`, or, if that fails and `fallback`, on the CPU.

    Returns (session, why `wanted` failed or "").
    """
    device = providers.device_of(wanted), options.device_number
    missing = providers.missing_libraries(wanted)

    def open_on(provider: str, chain: list[Any]) -> native.OpenedSession:
        with nullcontext() if providers.device_of(provider) == "cpu" else device_lock(device).opening():
            return native.open_with_sampler(
                lambda: _new_session(folder, chain, settings),
                settings,
                provider=provider,
                table_form=folder.manifest.sampler.table_form,
                sampler=options.sampler,
                device=device[1],
            )

    try:
        return open_on(wanted, providers.session_providers(wanted, options.provider_options)), ""
    except ProviderError:
        raise
    except Exception as error:  # noqa: BLE001  # unrelated classes
        if wanted == providers.CPU:
            raise _refusal_error(folder, error) from None
        # Open it on the CPU, to find out whether the graph or the provider is at fault.
        try:
            session = open_on(providers.CPU, [(providers.CPU, {})])
        except ProviderError:
            raise
        except Exception as second:  # noqa: BLE001
            raise _refusal_error(folder, second) from None
        why = "; ".join(filter(None, (one_line(error), missing)))
        if fallback:
            return session, why
        hint = _HINT_FOR_GRAPHS if "graph capture feature" in str(error) else "see `topw doctor`, or use provider='cpu'"
        raise ProviderError(f"{providers.short_name(wanted)} could not open {folder.model} ({why}); {hint}.") from None


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


def _refusal_error(folder: ModelFolder[Manifest], error: Exception) -> ManifestError:
    return ManifestError(
        f"onnxruntime {ort.__version__} refuses {folder.model} ({one_line(error)}); "
        "check the folder with `topw verify` or export the model again."
    )


def _check_io(folder: ModelFolder[Manifest], session: ort.InferenceSession) -> None:
    manifest = folder.manifest
    for what, specs, nodes in (
        ("input", manifest.inputs, graph_inputs(session)),
        ("output", manifest.outputs, session.get_outputs()),
    ):
        _compare_specs(what, {s.name: s for s in specs}, {n.name: n.type for n in nodes})
    for name in (*SAMPLER_INPUTS, *SAMPLER_OUTPUTS):
        if not any(spec.name == name for spec in (*manifest.inputs, *manifest.outputs)):
            raise ManifestError(
                f"{folder.model} has no {name!r}, so its sampler is not Top-W's; export the model again."
            )


def _compare_specs(what: str, specs: Mapping[str, TensorSpec], found: Mapping[str, str]) -> None:
    for name in sorted(specs.keys() | found.keys()):
        stated = f"tensor({specs[name].dtype})" if name in specs else "absent"
        actual = found.get(name, "absent")
        if stated != actual:
            raise ManifestError(
                f"{what} {name!r} is {actual} in model.onnx, but {stated} in the manifest: "
                "the two do not match; export the model again."
            )
