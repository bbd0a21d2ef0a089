"""From model.onnx to TensorRT's network and the configuration that it is built with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topw_deploy.errors import EngineError
from topw_deploy.files import open_regular
from topw_deploy.manifest import DecoderManifest
from topw_deploy.plugins.tensorrt.module import version_of
from topw_deploy.tensorrt import library
from topw_deploy.tensorrt.profiles import Profile
from topw_deploy.tensorrt.request import EngineRequest

MODEL = "model.onnx"
LEAST = (10, 15)  # the first TensorRT whose parser takes TensorScatter, as an update of the cache in place


def check_version(trt: Any) -> None:
    """Raises EngineError for a TensorRT that cannot build decoders with a cache in place."""
    if version_of(trt) < LEAST:
        raise EngineError(
            f"this is TensorRT {trt.__version__}, and a cache that is updated in place (TensorScatter) needs "
            f"{'.'.join(map(str, LEAST))} or later; install a newer one, or run the folder with onnxruntime."
        )


def parse(trt: Any, logger: Any, builder: Any, model: Path, *, fp16: bool) -> Any:
    """The network of `model`, whose weights are read from the files beside it by TensorRT itself.

    fp16: a network whose types TensorRT may lower; otherwise they are those of the graph.
    Raises EngineError with the parser's words.
    """
    flags = 0 if fp16 else 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(str(model)):
        return network
    told = [parser.get_error(i).desc() for i in range(parser.num_errors)] or [library.last_error(logger)]
    raise EngineError(
        f"TensorRT {trt.__version__} does not take {model} ({' '.join(told[0].split())[:300]}); "
        f"`topw check {model.parent} --target tensorrt` shows every such node."
    )


def configure(
    trt: Any, builder: Any, request: EngineRequest, manifest: DecoderManifest, profiles: Sequence[Profile]
) -> Any:
    """The builder's configuration: types, memory, timings and profiles as the request says."""
    config = builder.create_builder_config()
    # TensorRT would round the factors of float32 products to 10 bits; the graph was verified without that.
    config.clear_flag(trt.BuilderFlag.TF32)
    if request.fp16:
        _allow_half_precision(trt, config)
    if request.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request.workspace)
    if request.timing_cache is not None:
        _read_timings(config, request.timing_cache)
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for spec in manifest.inputs:
            shapes.set_shape(spec.name, *profile.shapes(spec))
        if config.add_optimization_profile(shapes) < 0:
            raise EngineError(f"TensorRT does not take the profile {profile}; give smaller bounds.")
    return config


def _allow_half_precision(trt: Any, config: Any) -> None:
    flag = getattr(trt.BuilderFlag, "FP16", None)
    if flag is None:
        raise EngineError(
            f"TensorRT {trt.__version__} computes in the types of the graph alone; export with --dtype fp16 instead of "
            "building with --fp16."
        )
    config.set_flag(flag)


def _read_timings(config: Any, path: Path) -> None:
    try:
        with open_regular(path, follow=True) as stream:
            data = stream.read()
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise EngineError(f"the timing cache {path} cannot be read: {error.strerror or error}.") from None
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, False):
        raise EngineError(
            f"the timing cache {path} is of another GPU or another TensorRT; delete it, or name another file."
        )
