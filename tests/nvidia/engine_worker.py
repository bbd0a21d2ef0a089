"""Builds engines with NVIDIA's builder, in the environment of make_environment.py.

Arguments: a JSON file of requests, {"out": folder, ...fields of TensorRTRequest}, of which the first one with "kernels"
registers the plugin; and the file to write the answers to: stamp, progress and the result of opening the engine, or the
error. There is no GPU, so the driver is a double.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from topw_deploy.errors import TopWError
from topw_deploy.plugins import driver
from topw_deploy.progress import Progress
from topw_deploy.tensorrt import api, engines
from topw_deploy.tensorrt.build import build_engine
from topw_deploy.tensorrt.request import TensorRTRequest

GPU = driver.Driver("13.0", (driver.Device("No GPU", 90),), "")


def build(request: dict[str, Any]) -> dict[str, Any]:
    shown: list[int] = []
    if kernels := request.pop("kernels", None):
        from topw_deploy.plugins.tensorrt import plugin
        from topw_deploy.plugins.tensorrt.kernels import PluginKernels

        plugin.register(PluginKernels(Path(kernels)))

    @contextlib.contextmanager
    def bar(total: int, unit: str) -> Iterator[Callable[[int], object]]:
        yield shown.append

    paths = {name: Path(request[name]) for name in ("out", "timing_cache") if name in request}
    try:
        built = build_engine(TensorRTRequest(**{**request, **paths}), Progress(bar=bar))
        path, stamp = engines.find_fitting_engine(paths["out"], engines.this_platform(built.stamp.tensorrt))
    except TopWError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"stamp": dataclasses.asdict(stamp), "path": str(path), "shown": shown, "opened": open_engine(path)}


def open_engine(path: Path) -> str:
    """Open an engine. Returns "an engine", or TensorRT's error; without a GPU, that of the missing driver."""
    trt = api.load_tensorrt()
    logger = api.new_logger(trt)
    runtime = api.create_object(trt, "Runtime", logger)
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        engine = runtime.deserialize_cuda_engine(view)
    return "an engine" if engine is not None else api.first_error(logger)


def main() -> None:
    driver.query_driver = lambda: GPU
    trt = api.load_tensorrt()
    del trt.IStreamWriter  # missing in TensorRT-RTX
    requests = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps([build(request) for request in requests]), encoding="utf-8")


if __name__ == "__main__":
    main()
