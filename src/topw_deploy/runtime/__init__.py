"""Runs what the exporter wrote: numpy, onnxruntime, tokenizers and jinja2, nothing else."""

from topw_deploy import telemetry

try:
    telemetry.switch_off()
    import onnxruntime as _onnxruntime  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "topw_deploy.runtime needs onnxruntime; run: pip install 'topw-deploy[cpu]' (or [gpu], never both)",
        name="onnxruntime",
    ) from None

from topw_deploy.runtime.model import TopWModel
from topw_deploy.runtime.results import GenerationResult, Piece, Timings
from topw_deploy.runtime.sampler import Samples, TopWSampler

__all__ = ["GenerationResult", "Piece", "Samples", "Timings", "TopWModel", "TopWSampler"]
