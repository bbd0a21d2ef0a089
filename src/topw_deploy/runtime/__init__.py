"""Runs what the exporter wrote: numpy, onnxruntime, tokenizers and jinja2, nothing else."""

from topw_deploy.runtime.model import TopWModel
from topw_deploy.runtime.results import GenerationResult, Piece, Timings
from topw_deploy.runtime.sampler import Samples, TopWSampler

__all__ = ["GenerationResult", "Piece", "Samples", "Timings", "TopWModel", "TopWSampler"]
