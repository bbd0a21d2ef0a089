"""One onnxruntime session over an exported graph, opened with the provider that was asked for or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import onnxruntime as ort

from topw_deploy.errors import GenerationError, ManifestError, ParameterError, ProviderError
from topw_deploy.manifest import DecoderManifest, TensorSpec
from topw_deploy.runtime import lookups, native, older, placement, providers
from topw_deploy.runtime.binding import Binding
from topw_deploy.runtime.device_binding import DeviceBinding, Lanes
from topw_deploy.runtime.face import Memory, Sampler
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.memory import DeviceMemory, HostMemory
from topw_deploy.runtime.turns import turns_of
from topw_deploy.sampling.parameters import PARAMETER_NAMES

SAMPLER_INPUTS = (*PARAMETER_NAMES, "uniform", "edit_ids", "edit_penalty", "edit_bias")
SAMPLER_OUTPUTS = ("next_token", "logprob", "kept", "certified")

_OFF = ("0", "false")  # how onnxruntime's provider options say no
_HINT_FOR_GRAPHS = (
    "leave enable_cuda_graph out, or export again with --dtype fp16, which leaves nothing to the CPU, and build the "
    "native sampler with `topw plugins build --cuda`"
)
# For CUDA; it joins RotaryEmbedding into GroupQueryAttention, where the export has not done so already. It takes onnx's
# RotaryEmbedding for onnxruntime's own, reads past its inputs, and ends the process (onnxruntime issue 28604).
_HARMFUL = ["GroupQueryAttentionFusion"]
_MOST_THREADS = 1024  # onnxruntime would start as many as it is told and never come back

# ONNX element types (TensorProto.DataType) by the names that the manifest uses.
ELEMENT_TYPES = {"float": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}


class OpenGraph:
    """onnxruntime's session `raw` with the face that the loop wants (runtime/face.py). device: the kind and number of
    where its tensors live, as onnxruntime names them. graphs: whether its steps are captured into CUDA graphs."""

    provider = providers.CPU
    sampler: Sampler = "graph"
    why_graph = ""
    cpu_nodes: tuple[placement.CpuNode, ...] = ()
    most_rows: int | None = None  # these three: a graph runs with whatever shapes it is given
    most_columns: int | None = None
    most_edits: int | None = None
    _lanes: Lanes | None = None

    def __init__(
        self, raw: ort.InferenceSession, device: tuple[str, int] = ("cpu", 0), *, graphs: bool = False
    ) -> None:
        self.raw, self.device = raw, device
        self._lanes = None if device[0] == "cpu" else Lanes(device, graphs=graphs)
        nodes = graph_inputs(raw)
        self.inputs = frozenset(node.name for node in nodes)
        self.with_defaults = frozenset(node.name for node in raw.get_overridable_initializers())
        self.outputs = tuple(node.name for node in raw.get_outputs())
        slots = next((node.shape[1] for node in nodes if node.name == "edit_ids"), None)
        self.fixed_edits = slots if isinstance(slots, int) else None

    def bind(self) -> Binding:
        """A new set of bindings: what one generation owns, so that several may run on one session at once."""
        return Binding(self) if self._lanes is None else DeviceBinding(self, self._lanes)

    def memory(self, size: int) -> Memory:
        """Zeroed memory of the session's device."""
        return HostMemory(size) if self._lanes is None else DeviceMemory(size, self.device)

    def run(self, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """onnxruntime's own run, of host arrays."""
        with nullcontext() if self._lanes is None else self._lanes.turns.using:
            found: list[np.ndarray] = self.raw.run(outputs, feeds)
        return found

    def settle(self, run: Callable[[], object]) -> None:
        """Nothing is left to be done."""

    def __del__(self) -> None:
        """Close onnxruntime's session while nobody captures a graph: that frees memory of the device."""
        if self._lanes is not None:
            with self._lanes.turns.using:
                del self.raw


class GraphSession(OpenGraph):
    """An open session: `raw` (the InferenceSession), the `provider` in use, the `device` (kind, number) that its
    tensors live on, the `sampler` that answers its node ("native" or "graph", then `why_graph` says why), and the
    `cpu_nodes` that another provider left to the CPU.

    provider: "auto", a short name such as "cpu" or "cuda", or onnxruntime's full name.
    provider_options: options of that provider, as onnxruntime documents them. With "enable_cuda_graph" every shape of
        a decoding step is captured once and run again from then on; the cache must have the form "static".
    session_options: an onnxruntime.SessionOptions to start from; it is used as it is but for the thread counts and,
        where the sampler may be native, the operator's registration. It may serve several sessions.
    intra_op_num_threads, inter_op_num_threads: >= 0, 0 means onnxruntime's choice.
    allow_fallback: accept another provider when the wanted one cannot start, and nodes that it leaves to the CPU.
    sampler: "auto" (the native operator where it can be had, else the function in the file), "native" or "graph".

    Raises ProviderError for a provider that is absent, did not start or leaves nodes to the CPU that compute, and for a
    native sampler that cannot be had; ManifestError for a graph that onnxruntime refuses or whose inputs and outputs
    are not those of the manifest; ParameterError for options.
    """

    def __init__(
        self,
        folder: ModelFolder,
        *,
        provider: str = "auto",
        provider_options: Mapping[str, Any] | None = None,
        session_options: ort.SessionOptions | None = None,
        intra_op_num_threads: int | None = None,
        inter_op_num_threads: int | None = None,
        allow_fallback: bool = False,
        sampler: str = "auto",
    ) -> None:
        native.check_choice(sampler)
        providers.check_options(provider, provider_options)
        options = _session_options(session_options, intra_op_num_threads, inter_op_num_threads)
        asked = providers.resolve(provider, allow_fallback)
        wanted = asked if providers.short_name(asked) in providers.available() else providers.CPU
        unused = asked == providers.CPU and _asks_for_graphs(provider_options)
        if unused and provider != "auto":
            raise ParameterError("enable_cuda_graph is for provider='cuda', and 'cpu' was asked for; leave it out.")
        graphs = _wants_graphs(folder, wanted, provider_options)
        older.check_graph(folder)
        self._profile = _placed(options) if wanted != providers.CPU else None
        self._lenient = allow_fallback or provider == "auto"
        try:
            opened, failure = _open(folder, wanted, provider_options, options, self._lenient, sampler)
        finally:
            if self._profile is not None:
                self._profile.restore()
        self.sampler, self.why_graph = opened.sampler, opened.why_graph
        self.provider = providers.check_used(wanted, opened.raw, self._lenient)
        lookups.check(folder, self.provider)
        if self.provider != providers.CPU and self._profile is None:
            self.cpu_nodes = placement.cpu_nodes(opened.raw)
        if not self._lenient:
            placement.check(self.cpu_nodes, self.provider)
        self._tell(asked, failure, unused)
        _check_io(folder, opened.raw)
        device = providers.device_of(self.provider), _device_number(provider_options)
        super().__init__(opened.raw, device, graphs=graphs and self.provider == providers.CUDA)

    def settle(self, run: Callable[[], object]) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        try:
            run()
        except GenerationError as error:
            reason = str(error).rstrip(".")
            raise ProviderError(
                f"{providers.short_name(self.provider)} opens the model, but does not run it: {reason}; see "
                "`topw doctor`, or use provider='cpu'.",
                "provider",
            ) from None
        nodes = profile.nodes(self.raw)
        if self.provider == providers.CPU:
            return
        self.cpu_nodes = placement.cpu_nodes_in(nodes)
        if not nodes:
            raise ProviderError(
                f"onnxruntime {ort.__version__} does not say which nodes {providers.short_name(self.provider)} runs; "
                "install 1.24 or newer, or use provider='cpu'.",
                "provider",
            )
        if not self._lenient:
            placement.check(self.cpu_nodes, self.provider)
        self._tell(self.provider, "", graphs_unused=False)

    def _tell(self, asked: str, failure: str, graphs_unused: bool) -> None:
        """Warn of what was accepted. failure: what the provider said that was asked for, if it said anything."""
        doctor, name = "; `topw doctor` says what is missing", providers.short_name(asked)
        if self.provider != asked:
            if name not in providers.available():
                failure = providers.why_absent(name)
            failure = failure or providers.missing_libraries(asked)
            what = f"{name} could not start, running on {providers.short_name(self.provider)}"
            what += f": {failure}" if failure else doctor
        elif graphs_unused:
            what = "enable_cuda_graph is not used: running on cpu"
        else:
            what = placement.complaint(self.cpu_nodes, self.provider)
            what += doctor if what else ""
        if what:
            warnings.warn(f"{what}.", RuntimeWarning, stacklevel=5)


def _placed(options: ort.SessionOptions) -> older.Profile | None:
    """Have onnxruntime remember where the nodes of a session are. A profile where it can only be watched."""
    if not placement.reported():
        return older.Profile(options)
    placement.record(options)
    return None


def graph_inputs(session: ort.InferenceSession) -> list[ort.NodeArg]:
    """All inputs of the graph, those that have a default included, which onnxruntime lists apart."""
    return [*session.get_inputs(), *session.get_overridable_initializers()]


def empty_value(shape: tuple[int, ...], dtype: str, device: tuple[str, int]) -> Any:
    """A raw OrtValue without elements (one dimension is 0) of the manifest's element type `dtype`."""
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, ELEMENT_TYPES[dtype], *device)._ortvalue


def _wants_graphs(folder: ModelFolder, provider: str, provider_options: Mapping[str, Any] | None) -> bool:
    """Whether steps are to be captured into CUDA graphs. Raises ParameterError where they cannot be."""
    if provider != providers.CUDA or not _asks_for_graphs(provider_options):
        return False
    manifest = folder.manifest
    form = manifest.decoder.kv_form if isinstance(manifest, DecoderManifest) else None
    if form != "static":
        what = "a sampler alone" if form is None else f"a cache of the form {form!r}"
        raise ParameterError(
            f"enable_cuda_graph needs steps of one shape, and {folder.path} has {what}; leave it out, or export a "
            "model with --kv static."
        )
    return True


def _asks_for_graphs(provider_options: Mapping[str, Any] | None) -> bool:
    return str((provider_options or {}).get("enable_cuda_graph", "0")).lower() not in _OFF


def _device_number(provider_options: Mapping[str, Any] | None) -> int:
    return int((provider_options or {}).get("device_id", 0))


def _session_options(given: ort.SessionOptions | None, intra: int | None, inter: int | None) -> ort.SessionOptions:
    options = given
    if options is None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # warnings about constant folding are not for users
    elif not isinstance(options, ort.SessionOptions):
        raise ParameterError(f"session_options is a {type(given).__name__}, but must be an onnxruntime.SessionOptions.")
    for name, value in (("intra_op_num_threads", intra), ("inter_op_num_threads", inter)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_THREADS:
            raise ParameterError(
                f"{name} is {value!r}, but must be an integer in [0, {_MOST_THREADS}] (0: onnxruntime's choice).",
                name,
            )
        setattr(options, name, value)
    return options


def _open(
    folder: ModelFolder,
    wanted: str,
    provider_options: Mapping[str, Any] | None,
    options: ort.SessionOptions,
    fallback: bool,
    sampler: str,
) -> tuple[native.Opened, str]:
    """The session, and why it is the CPU's where another provider was wanted and `fallback` allows that."""

    device = providers.device_of(wanted), _device_number(provider_options)
    missing = providers.missing_libraries(wanted)

    def on(provider: str, chain: list[Any]) -> native.Opened:
        with nullcontext() if providers.device_of(provider) == "cpu" else turns_of(device).opening():
            return native.open_session(
                lambda: _new_session(folder, chain, options),
                options,
                provider=provider,
                table_form=folder.manifest.sampler.table_form,
                sampler=sampler,
                device=device[1],
            )

    try:
        return on(wanted, providers.session_providers(wanted, provider_options)), ""
    except ProviderError:
        raise
    except Exception as error:  # noqa: BLE001  # onnxruntime raises a dozen unrelated classes here
        if wanted == providers.CPU:
            raise _refused(folder, error) from None
        # The graph may be fine and the provider not: what the CPU says about the same file tells which.
        try:
            session = on(providers.CPU, [(providers.CPU, {})])
        except ProviderError:
            raise
        except Exception as second:  # noqa: BLE001
            raise _refused(folder, second) from None
        why = "; ".join(filter(None, (native.one_line(error), missing)))
        if fallback:
            return session, why
        hint = _HINT_FOR_GRAPHS if "graph capture feature" in str(error) else "see `topw doctor`, or use provider='cpu'"
        raise ProviderError(f"{providers.short_name(wanted)} could not open {folder.model} ({why}); {hint}.") from None


def _new_session(folder: ModelFolder, chain: list[Any], options: ort.SessionOptions) -> ort.InferenceSession:
    # enable_fallback would print to stdout and retry on another provider; read_config_from_model would let the
    # file choose session options, which can name libraries to load.
    return ort.InferenceSession(
        folder.model,
        options,
        providers=chain,
        enable_fallback=0,
        read_config_from_model=0,
        disabled_optimizers=_HARMFUL if chain[0][0] != providers.CPU else None,
    )


def _refused(folder: ModelFolder, error: Exception) -> ManifestError:
    return ManifestError(
        f"onnxruntime {ort.__version__} refuses {folder.model} ({native.one_line(error)}); "
        "check the folder with `topw verify` or export the model again."
    )


def _check_io(folder: ModelFolder, session: ort.InferenceSession) -> None:
    manifest = folder.manifest
    for what, specs, nodes in (
        ("input", manifest.inputs, graph_inputs(session)),
        ("output", manifest.outputs, session.get_outputs()),
    ):
        _compare(what, {s.name: s for s in specs}, {n.name: n.type for n in nodes})
    for name in (*SAMPLER_INPUTS, *SAMPLER_OUTPUTS):
        if not any(spec.name == name for spec in (*manifest.inputs, *manifest.outputs)):
            raise ManifestError(
                f"{folder.model} has no {name!r}, so its sampler is not Top-W's; export the model again."
            )


def _compare(what: str, specs: Mapping[str, TensorSpec], found: Mapping[str, str]) -> None:
    for name in sorted(specs.keys() | found.keys()):
        stated = f"tensor({specs[name].dtype})" if name in specs else "absent"
        actual = found.get(name, "absent")
        if stated != actual:
            raise ManifestError(
                f"{what} {name!r} is {actual} in model.onnx, but {stated} in the manifest: "
                "the two do not belong together; export the model again."
            )
