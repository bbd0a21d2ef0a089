"""TensorRT's Python module: imports it, creates its objects, collects its errors, and runs its ONNX parser."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import PluginError, TensorRTError
from topw_deploy.plugins.tensorrt import register, registered, tensorrt_module
from topw_deploy.tensorrt.model_file import map_model


def load_tensorrt() -> Any:
    """Import `tensorrt`. Raises TensorRTError if the package is missing, broken or too old."""
    try:
        return tensorrt_module()
    except PluginError as error:
        raise TensorRTError(str(error)) from None


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


@dataclass(frozen=True)
class ParserAnswer:
    """What TensorRT's parser says about a graph.

    version: of TensorRT.
    takes: whether the parser accepts the whole graph.
    plugin: whether the sampler node had a plugin.
    refusals: one line per refused node.
    """

    version: str
    takes: bool
    plugin: bool
    refusals: tuple[str, ...] = ()


def ask_parser(model: Path) -> ParserAnswer:
    """Parse `model` with the installed TensorRT, and with the sampler's plugin if that is available.

    Raises PluginError without TensorRT, TensorRTError without a GPU or for a file that cannot be read.
    """
    trt = tensorrt_module()
    with contextlib.suppress(PluginError):  # without the plugin, the parser inlines the function
        register()
    logger = new_logger(trt)
    builder = create_object(trt, "Builder", logger)
    network = builder.create_network(0)  # must outlive the parser, which holds no reference to it
    parser = trt.OnnxParser(network, logger)
    with map_model(model) as file:
        data = bytes(file)
    takes = parser.supports_model_v2(data, str(model))
    refusals = tuple(_refusal(parser.get_error(index)) for index in range(parser.num_errors))
    return ParserAnswer(str(trt.__version__), bool(takes), registered(), refusals)


def _refusal(error: Any) -> str:
    """A line such as `GroupQueryAttention (layers.0.attention in Function): reason`."""
    stack = [str(each) for each in getattr(error, "local_function_stack", list)()]
    where = " in ".join([error.node_name(), *reversed(stack)])
    return f"{error.node_operator()} ({where}): {' '.join(error.desc().split())[:300]}"


def parse_model(trt: Any, logger: Any, builder: Any, model: Path, *, fp16: bool) -> Any:
    """Parse `model`. Returns the network. Raises TensorRTError with the parser's message.

    fp16: let TensorRT compute float32 operators in half precision.
    """
    flags = 0 if fp16 else 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(str(model)):
        return network
    reasons = [parser.get_error(i).desc() for i in range(parser.num_errors)] or [first_error(logger)]
    raise TensorRTError(
        f"TensorRT {trt.__version__} does not accept {model} ({' '.join(reasons[0].split())[:300]}); "
        f"`topw check {model.parent} --target tensorrt` shows every such node."
    )
