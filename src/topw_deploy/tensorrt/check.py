"""TensorRT's module: its objects and errors, the plugin for the sampler's node, and its ONNX parser."""

from __future__ import annotations

import importlib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy import install
from topw_deploy.errors import TensorRTError
from topw_deploy.install import major_minor
from topw_deploy.manifest import MODEL_NAME, DecoderManifest, Manifest, load_manifest
from topw_deploy.plugins import library

OLDEST = (10, 15)
"""The first TensorRT with TensorScatter, which updates a cache in place, and with plugins for nodes with a function."""

PLUGIN = ("TopWSample", "1", "topw")
"""The plugin's name, version and namespace (plugins/tensorrt/topw_plugin.cpp)."""

BUILT_WITH = f"{PLUGIN[1]}.{library.CUDA_ABI_VERSION}"
"""The versions of the plugin and of the kernels' interface, which determines an engine's workspace."""

_MODULES = ("tensorrt", "tensorrt_bindings")  # the second comes without the package that downloads NVIDIA's libraries


def load_tensorrt() -> Any:
    """Import TensorRT's Python module. Raises TensorRTError if it is missing, broken or older than OLDEST."""
    failures = []
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # of the module or of NVIDIA's libraries
            if not isinstance(error, ModuleNotFoundError) or error.name != name:
                failures.append(f" ({name}: {error})")
            continue
        if major_minor(module.__version__) < OLDEST:
            raise TensorRTError(
                f"this is TensorRT {module.__version__}, but a cache that is updated in place (TensorScatter) needs "
                f"{'.'.join(map(str, OLDEST))} or later; install a newer one, or run the folder with onnxruntime."
            )
        return module
    raise TensorRTError(
        f"TensorRT's Python module {'cannot be imported' if failures else 'is not installed'}{''.join(failures)}; "
        f"install TensorRT, which on a Jetson comes with JetPack, or run: {install.install_command('tensorrt')}"
    )


def new_logger(trt: Any) -> Any:
    """A logger that prints nothing and collects error messages in its list `errors`, oldest first."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base is a value of the module
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))

    return Logger()


def create_object(trt: Any, kind: str, logger: Any) -> Any:
    """Create a tensorrt.Builder or tensorrt.Runtime (`kind`). Raises TensorRTError if CUDA does not start."""
    try:
        return getattr(trt, kind)(logger)
    except (RuntimeError, TypeError) as error:  # pybind11's errors for a null object
        raise TensorRTError(f"TensorRT {trt.__version__} does not start here ({first_error(logger)})") from error


def first_error(logger: Any) -> str:
    """The first logged error as a clause. Later errors are its consequences."""
    return str(logger.errors[0])[:300] if logger.errors else "it gave no reason"


def plugin_registered(trt: Any) -> bool:
    """Whether a plugin for the sampler's node is in TensorRT's registry."""
    creators = trt.get_plugin_registry().all_creators
    return any((each.name, each.plugin_version, each.plugin_namespace) == PLUGIN for each in creators)


def register_plugin(trt: Any, path: Path | None = None) -> str:
    """Register the plugin of the library at `path`, by default of the CUDA library in use, unless one is registered.

    Returns why there is none, as a clause; "" if there is one. Raises TensorRTError if the library has no plugin.
    """
    if plugin_registered(trt):
        return ""
    if path is None:
        found, why = library.load_selected("cuda")
        if found is None:
            return why
        if why := found.missing_code(library.query_driver().devices):
            return why
        path = found.path
    elif not path.is_file():
        raise TensorRTError(f"the plugin's library {path} is not a file; `topw plugins build --cuda` builds one.")
    trt.get_plugin_registry().load_library(str(path.absolute()))
    if not plugin_registered(trt):
        raise TensorRTError(
            f"{path} has no plugin for the sampler's node; `topw plugins build --cuda` builds one that has."
        )
    return ""


@dataclass(frozen=True)
class CheckReport:
    """What TensorRT's parser says about an exported graph.

    tensorrt: its version.
    takes: whether the parser accepts the whole graph.
    why_no_plugin: why the sampler's node had no plugin, as a clause, so that the parser inlined its function; "" if it
        had one.
    refusals: one line per refused node.
    next_step: what to do next, in one line.
    """

    folder: str
    tensorrt: str
    takes: bool
    why_no_plugin: str
    refusals: tuple[str, ...]
    next_step: str


def check(out: Path) -> CheckReport:
    """Ask TensorRT's parser which nodes of the folder's graph it takes, with the sampler's plugin if there is one.

    Raises ManifestError, and TensorRTError without TensorRT or for a file that cannot be read.
    """
    manifest = load_manifest(out)
    try:
        trt = load_tensorrt()
    except TensorRTError as error:
        raise TensorRTError(
            f"{error} (or copy the folder to the machine that will run it, and there run: topw check "
            f"{shlex.quote(str(out))})"
        ) from None
    why = register_plugin(trt)
    logger = new_logger(trt)
    builder = create_object(trt, "Builder", logger)
    network = builder.create_network(0)  # must outlive the parser, which holds no reference to it
    parser = trt.OnnxParser(network, logger)
    takes = bool(parser.supports_model_v2((out / MODEL_NAME).read_bytes(), str(out / MODEL_NAME)))
    refusals = tuple(_refusal_line(parser.get_error(index)) for index in range(parser.num_errors))
    return CheckReport(str(out), str(trt.__version__), takes, why, refusals, _advise(manifest, out, takes, why))


def _refusal_line(error: Any) -> str:
    """A line such as `GroupQueryAttention (layers.0.attention in Function): reason`."""
    stack = [str(each) for each in getattr(error, "local_function_stack", list)()]
    where = " in ".join([error.node_name(), *reversed(stack)])
    return f"{error.node_operator()} ({where}): {' '.join(error.desc().split())[:300]}"


def _advise(manifest: Manifest, out: Path, takes: bool, why_no_plugin: str) -> str:
    if not isinstance(manifest, DecoderManifest):
        if takes:
            return "give model.onnx to TensorRT's builder, with a profile of your batches and edits"
        return "export the sampler again with --top-m at most 3840, or run `topw plugins build --cuda` for the plugin"
    if takes and manifest.decoder.target == "tensorrt" and manifest.decoder.kv_form == "static":
        return f"topw build-engine {shlex.quote(str(out))}"
    plugin = ", or run `topw plugins build --cuda` for the sampler's plugin" if why_no_plugin and not takes else ""
    return f"export the original model again with --target tensorrt --max-length N{plugin}"


def parse_model(trt: Any, logger: Any, builder: Any, model: Path) -> Any:
    """Parse `model`. Returns the network, which computes in the graph's types.

    Raises TensorRTError with the parser's message.
    """
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(str(model)):
        return network
    reasons = [parser.get_error(i).desc() for i in range(parser.num_errors)] or [first_error(logger)]
    raise TensorRTError(
        f"TensorRT {trt.__version__} does not accept {model} ({' '.join(reasons[0].split())[:300]}); "
        f"`topw check {model.parent}` shows every such node."
    )
