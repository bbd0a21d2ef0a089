"""Reads an exported graph for TensorRT."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topw_deploy.errors import TensorRTError
from topw_deploy.files import NotRegularError, map_file
from topw_deploy.onnx_file import model
from topw_deploy.onnx_file.model import Model
from topw_deploy.onnx_file.protobuf import ProtobufError


def read_model(path: Path) -> Model:
    """Read a model.

    Raises TensorRTError for a file that is not readable, not ONNX, or larger than any published graph.
    """
    with map_model(path) as data:
        return model.read_model(data)


def without_function(path: Path, domain: str, name: str) -> bytes:
    """The file's bytes without the model-local function `domain`::`name`.

    TensorRT before 10.15 inlines a node's function even if a plugin is registered. To prevent that, call
    `parser.parse(without_function(path, "topw", "TopWSample"), str(path))`; the parser finds the weights by the path.

    Raises TensorRTError for a file that is not readable or not ONNX.
    """
    with map_model(path) as data:
        return model.without_function(data, domain, name)


@contextmanager
def map_model(path: Path) -> Iterator[memoryview]:
    """Map the file's bytes into memory. Raises TensorRTError, also for a ProtobufError that the block raises."""
    try:
        yield memoryview(map_file(path))
    except ProtobufError as error:
        raise TensorRTError(f"{path} is not an ONNX model ({error}); export the model again.") from None
    except NotRegularError as error:
        raise TensorRTError(f"{path} is {error.kind}, not a regular file; copy the file itself there.") from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise TensorRTError(f"{path} cannot be read: {error}.") from None
