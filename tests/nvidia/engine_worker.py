"""Builds engines with NVIDIA's builder, in the environment of make_environment.py.

Arguments: a JSON file of requests, {"out": folder, ...parameters of build_engine}; and the file to write the answers
to: stamp, progress and the result of opening the engine, or the error. There is no GPU, so the driver is a double.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from topw_deploy.errors import TopWError
from topw_deploy.plugins import library
from topw_deploy.progress import Progress
from topw_deploy.tensorrt import check, stamp
from topw_deploy.tensorrt.build import build_engine

GPU = library.Driver("13.0", (library.Device("No GPU", 90),), "")


def build(request: dict[str, Any]) -> dict[str, Any]:
    shown: list[int] = []

    @contextlib.contextmanager
    def bar(total: int, unit: str) -> Iterator[Callable[[int], object]]:
        yield shown.append

    paths = {name: Path(request[name]) for name in ("out", "timing_cache") if name in request}
    try:
        built = build_engine(**{**request, **paths}, progress=Progress(bar=bar))
        path, found = stamp.find_fitting_engine(paths["out"], stamp.this_platform(built.stamp.tensorrt))
    except TopWError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"stamp": msgspec.to_builtins(found), "path": str(path), "shown": shown, "opened": open_engine(path)}


def open_engine(path: Path) -> str:
    """Open an engine. Returns "an engine", or TensorRT's error; without a GPU, that of the missing driver."""
    trt = check.load_tensorrt()
    logger = check.new_logger(trt)
    runtime = check.create_object(trt, "Runtime", logger)
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        engine = runtime.deserialize_cuda_engine(view)
    return "an engine" if engine is not None else check.first_error(logger)


def write_whole(builder: Any, network: Any, config: Any, writer: Any) -> bool:
    plan = builder.build_serialized_network(network, config)
    return plan is not None and writer.write(memoryview(plan)) == plan.nbytes


def main() -> None:
    library.query_driver = lambda: GPU
    check.load_tensorrt().Builder.build_serialized_network_to_stream = write_whole  # missing in TensorRT-RTX
    requests = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps([build(request) for request in requests]), encoding="utf-8")


if __name__ == "__main__":
    main()
