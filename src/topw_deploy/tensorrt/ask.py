"""What TensorRT's own parser says of a graph, where its Python module is installed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import EngineError, PluginError
from topw_deploy.files import open_regular
from topw_deploy.plugins.tensorrt import register, registered, tensorrt_module
from topw_deploy.tensorrt import library


@dataclass(frozen=True)
class ParserAnswer:
    """version: of TensorRT. takes: whether the parser takes the whole graph. plugin: whether a plugin for the sampler's
    node was registered. refusals: what it says against the rest, one line per node."""

    version: str
    takes: bool
    plugin: bool
    refusals: tuple[str, ...] = ()


def ask_parser(model: Path) -> ParserAnswer:
    """Have the parser of the TensorRT that is installed read `model`, with the sampler's plugin where it can be had.

    Raises PluginError where there is no TensorRT, EngineError where it does not start (it wants a GPU).
    """
    trt = tensorrt_module()
    with contextlib.suppress(PluginError):  # without the CUDA library the function is inlined
        register()
    logger = library.new_logger(trt)
    builder = library.start(trt, "Builder", logger)
    network = builder.create_network(0)  # the parser does not keep it
    parser = trt.OnnxParser(network, logger)
    try:
        with open_regular(model) as stream:
            data = stream.read()
    except OSError as error:
        raise EngineError(f"{model} cannot be read: {error.strerror or error}.") from None
    takes = parser.supports_model_v2(data, str(model))
    refusals = tuple(_line(parser.get_error(index)) for index in range(parser.num_errors))
    return ParserAnswer(str(trt.__version__), bool(takes), registered(), refusals)


def _line(error: Any) -> str:
    """`GroupQueryAttention (layers.0.attention): what it says`, with the function that the node stands in."""
    stack = [str(each) for each in getattr(error, "local_function_stack", list)()]
    where = " in ".join([error.node_name(), *reversed(stack)])
    return f"{error.node_operator()} ({where}): {' '.join(error.desc().split())[:300]}"
