"""NVIDIA's module `tensorrt`, imported when it is wanted and not before."""

from __future__ import annotations

from typing import Any

from topw_deploy.errors import EngineError, PluginError
from topw_deploy.plugins.tensorrt import tensorrt_module


def load() -> Any:
    """The module. Raises EngineError where it is not installed, does not start or is too old."""
    try:
        return tensorrt_module()
    except PluginError as error:
        raise EngineError(str(error)) from None


def new_logger(trt: Any) -> Any:
    """A logger that prints nothing and keeps the errors it is told, oldest first, as `errors`."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base is a value of the module
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))

    return Logger()


def start(trt: Any, kind: str, logger: Any) -> Any:
    """A tensorrt.Builder or tensorrt.Runtime (`kind`). Raises EngineError where CUDA does not let it start."""
    try:
        return getattr(trt, kind)(logger)
    except (RuntimeError, TypeError) as error:  # what its constructor makes of an object that there is not
        raise EngineError(f"TensorRT {trt.__version__} does not start here ({last_error(logger)})") from error


def last_error(logger: Any) -> str:
    """The first error that `logger` was told, as a clause: those after it are its consequences."""
    return str(logger.errors[0])[:300] if logger.errors else "it gave no reason"
