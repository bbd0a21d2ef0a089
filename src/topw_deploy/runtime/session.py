"""One onnxruntime session over an exported graph, opened with the provider that was asked for or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from topw_deploy.errors import GenerationError, ManifestError, ParameterError, ProviderError
from topw_deploy.manifest import TensorSpec
from topw_deploy.runtime import native, providers
from topw_deploy.runtime.face import Memory, Sampler
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.memory import DeviceMemory, HostMemory
from topw_deploy.sampling.parameters import PARAMETER_NAMES

SAMPLER_INPUTS = (*PARAMETER_NAMES, "uniform", "edit_ids", "edit_penalty", "edit_bias")
SAMPLER_OUTPUTS = ("next_token", "logprob", "kept", "certified")

_MOST_THREADS = 1024  # onnxruntime would start as many as it is told and never come back

# ONNX element types (TensorProto.DataType) by the names that the manifest uses.
ELEMENT_TYPES = {"float": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}


class OpenGraph:
    """onnxruntime's session `raw` with the face that the loop wants (runtime/face.py). device: the kind and number of
    where its tensors live, as onnxruntime names them."""

    provider = providers.CPU
    sampler: Sampler = "graph"
    why_graph = ""
    most_rows: int | None = None  # these three: a graph runs with whatever shapes it is given
    most_columns: int | None = None
    most_edits: int | None = None

    def __init__(self, raw: ort.InferenceSession, device: tuple[str, int] = ("cpu", 0)) -> None:
        self.raw, self.device = raw, device
        nodes = graph_inputs(raw)
        self.inputs = frozenset(node.name for node in nodes)
        self.with_defaults = frozenset(node.name for node in raw.get_overridable_initializers())
        self.outputs = tuple(node.name for node in raw.get_outputs())
        slots = next((node.shape[1] for node in nodes if node.name == "edit_ids"), None)
        self.fixed_edits = slots if isinstance(slots, int) else None

    def bind(self) -> Binding:
        """A new set of bindings: what one generation owns, so that several may run on one session at once."""
        return Binding(self)

    def memory(self, size: int) -> Memory:
        """Zeroed memory of the session's device."""
        return HostMemory(size) if self.device[0] == "cpu" else DeviceMemory(size, self.device)


class GraphSession(OpenGraph):
    """An open session: `raw` (the InferenceSession), the `provider` in use, the `device` (kind, number) that its
    tensors live on, and the `sampler` that answers its node ("native" or "graph", then `why_graph` says why).

    provider: "auto", a short name such as "cpu" or "cuda", or onnxruntime's full name.
    provider_options: options of that provider, as onnxruntime documents them.
    session_options: an onnxruntime.SessionOptions to start from; it is used as it is but for the thread counts and,
        where the sampler may be native, the operator's registration. It may serve several sessions.
    intra_op_num_threads, inter_op_num_threads: >= 0, 0 means onnxruntime's choice.
    allow_fallback: accept another provider when the wanted one cannot start.
    sampler: "auto" (the native operator where it can be had, else the function in the file), "native" or "graph".

    Raises ProviderError for a provider that is absent or did not start and for a native sampler that cannot be had,
    ManifestError for a graph that onnxruntime refuses or whose inputs and outputs are not those of the manifest,
    ParameterError for options.
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
        options = _session_options(session_options, intra_op_num_threads, inter_op_num_threads)
        asked = providers.resolve(provider, allow_fallback)
        wanted = asked if providers.short_name(asked) in providers.available() else providers.CPU
        auto = provider == "auto"
        opened = _open(folder, wanted, provider_options, options, allow_fallback or auto, sampler)
        self.sampler, self.why_graph = opened.sampler, opened.why_graph
        self.provider = providers.check_used(wanted, opened.raw, allow_fallback or auto)
        if self.provider != asked:
            warnings.warn(
                f"{providers.short_name(asked)} could not start, running on {providers.short_name(self.provider)}; "
                "`topw doctor` says what is missing.",
                RuntimeWarning,
                stacklevel=4,
            )
        _check_io(folder, opened.raw)
        device = providers.device_of(self.provider), int((provider_options or {}).get("device_id", 0))
        super().__init__(opened.raw, device)


class Binding:
    """onnxruntime's IO binding without its convenience layer, which costs as much again on every step.

    Host arrays are bound by address and must stay alive and where they are: `bind_array` keeps a reference. On a
    provider with memory of its own a host input is copied when it is bound, so a changed array is bound again.
    """

    def __init__(self, session: OpenGraph) -> None:
        self._session = session
        self._io = ort.SessionIOBinding(session.raw._sess)
        self._run = session.raw._sess.run_with_iobinding
        self._device = ort.OrtDevice.make(*session.device)._get_c_device()
        self._with_defaults = session.with_defaults
        self._arrays: dict[str, np.ndarray] = {}
        self._bound_outputs: list[str] = []
        self._changing: list[str] = []  # inputs that every run copies; none on the host
        self.host_memory = session.device[0] == "cpu"
        self.bind_value = self._io.bind_ortvalue_input  # (name, raw OrtValue): no copy, no Python object
        self.outputs = self._io.get_outputs  # () -> onnxruntime's vector of the last run's, in the order of binding

    def bind_array(self, name: str, array: np.ndarray) -> None:
        """Bind a contiguous host array as an input."""
        self._arrays[name] = array
        if name in self._with_defaults:  # which onnxruntime does not look for among the inputs when it binds an array
            self._io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array)._ortvalue)
        else:
            self._io.bind_input(name, array)

    def bind_changing(self, name: str, array: np.ndarray) -> None:
        """Bind a host array as `bind_array` does; every run sees what it holds then."""
        self.bind_array(name, array)
        if not self.host_memory and name not in self._changing:
            self._changing.append(name)

    def refresh(self, name: str) -> None:
        """Make the graph see what was written into the bound array of `name` since it was bound."""
        if not self.host_memory:
            self.bind_array(name, self._arrays[name])

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        """Bind memory of the session's device as input `source` and as output `target` at once; it must stay alive."""
        self._bound_outputs.append(target)
        self._io.bind_input(source, self._device, element_type, shape, pointer)
        self._io.bind_output(target, self._device, element_type, shape, pointer)

    def bind_result(self, name: str, array: np.ndarray) -> None:
        """Have every run write output `name` into this contiguous host array of the right shape."""
        self._arrays[name] = array
        self._bound_outputs.append(name)
        self._io.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array)._ortvalue)

    def bind_fresh(self, name: str) -> int:
        """Have the next run allocate output `name` on the session's device; returns its place in `outputs`."""
        self._bound_outputs.append(name)
        self._io.bind_output(name, self._device)
        return len(self._bound_outputs) - 1

    def bind_fresh_again(self, name: str) -> None:
        """Let go of the value of `name` that the last run made: the next run allocates another."""
        self._io.bind_output(name, self._device)

    def another(self) -> Binding:
        """One with nothing bound."""
        return Binding(self._session)

    def close(self) -> None:
        """Nothing is kept for one generation but what its arrays hold."""

    def run(self, step: int | None = None) -> None:
        """Run the graph once. Raises GenerationError with onnxruntime's words; `step` None: a piece of a prompt."""
        for name in self._changing:
            self.refresh(name)
        try:
            self._run(self._io, None)
        except Exception as error:  # noqa: BLE001  # onnxruntime raises a dozen unrelated classes
            where = "in the prompt" if step is None else f"at step {step}"
            raise GenerationError(f"onnxruntime failed {where}: {' '.join(str(error).split())[:300]}") from None


def graph_inputs(session: ort.InferenceSession) -> list[ort.NodeArg]:
    """All inputs of the graph, those that have a default included, which onnxruntime lists apart."""
    return [*session.get_inputs(), *session.get_overridable_initializers()]


def empty_value(shape: tuple[int, ...], dtype: str, device: tuple[str, int]) -> Any:
    """A raw OrtValue without elements (one dimension is 0) of the manifest's element type `dtype`."""
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, ELEMENT_TYPES[dtype], *device)._ortvalue


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
                f"{name} is {value!r}, but must be an integer in [0, {_MOST_THREADS}] (0: onnxruntime's choice)."
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
) -> native.Opened:
    def on(provider: str, chain: list[Any]) -> native.Opened:
        return native.open_session(
            lambda: _new_session(folder, chain, options),
            options,
            provider=provider,
            table_form=folder.manifest.sampler.table_form,
            sampler=sampler,
        )

    try:
        return on(wanted, providers.session_providers(wanted, provider_options))
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
        if fallback:
            return session
        raise ProviderError(
            f"{providers.short_name(wanted)} could not open {folder.model} ({native.one_line(error)}); "
            "see `topw doctor`, or use provider='cpu'."
        ) from None


def _new_session(folder: ModelFolder, chain: list[Any], options: ort.SessionOptions) -> ort.InferenceSession:
    # enable_fallback would print to stdout and retry on another provider; read_config_from_model would let the
    # file choose session options, which can name libraries to load.
    return ort.InferenceSession(folder.model, options, providers=chain, enable_fallback=0, read_config_from_model=0)


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
