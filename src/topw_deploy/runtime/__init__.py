"""Runs what the exporter wrote: numpy, onnxruntime, tokenizers and jinja2, nothing else."""

from topw_deploy import install, telemetry
from topw_deploy.errors import MissingPackageError

try:
    telemetry.switch_off()
    import onnxruntime as _onnxruntime  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "onnxruntime":
        raise
    raise MissingPackageError(install.sentence("running a model", "cpu"), name="onnxruntime") from None

from topw_deploy.runtime.model import TopWModel
from topw_deploy.runtime.results import GenerationResult, Piece, Timings
from topw_deploy.runtime.sampler import Samples, TopWSampler

__all__ = ["GenerationResult", "Piece", "Samples", "Timings", "TopWModel", "TopWSampler"]
