"""TensorRT's Python module: import it, create its top-level objects, collect its errors."""

from __future__ import annotations

from typing import Any

from topw_deploy.errors import PluginError, TensorRTError
from topw_deploy.plugins.tensorrt import tensorrt_module


def load() -> Any:
    """Import `tensorrt`. Raises TensorRTError if missing, broken or too old."""
    try:
        return tensorrt_module()
    except PluginError as error:
        raise TensorRTError(str(error)) from None


def new_logger(trt: Any) -> Any:
    """A silent logger with a list `errors`, oldest first."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base is a value of the module
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))

    return Logger()


def create(trt: Any, kind: str, logger: Any) -> Any:
    """A tensorrt.Builder or tensorrt.Runtime (`kind`). Raises TensorRTError if CUDA does not start."""
    try:
        return getattr(trt, kind)(logger)
    except (RuntimeError, TypeError) as error:  # pybind11's errors for a null object
        raise TensorRTError(f"TensorRT {trt.__version__} does not start here ({first_error(logger)})") from error


def first_error(logger: Any) -> str:
    """The first logged error as a clause; later ones are its consequences."""
    return str(logger.errors[0])[:300] if logger.errors else "it gave no reason"
