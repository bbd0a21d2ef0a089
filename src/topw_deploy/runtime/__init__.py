"""Run exported models with numpy, onnxruntime, tokenizers and minijinja.

A call of `TopWModel.generate` crosses these modules:
model: the public class.
parameters: the table of all parameters, and their checks.
prepare: prompts and parameters become sequences.
tokenizer: text to token ids and back.
sequence: what each sequence has drawn, its text and its end.
loop: prefill and decode steps, and what each returns.
inputs: what each step feeds to the sampler.
cache.in_place, cache.buffers: key-value caches, memory, records of draws; for the form `concat`, cache.concat.
ort.session: runs of the graph; on a device, ort.device.

Other modules read what a request may add:
speculate: drafts of the next tokens, and runs that read them.
draft_model: drafts by a smaller model.
structured: schemas and grammars.
chat, tools: chat templates, tool calls.

Others open a model:
session, ort: sessions; those of TensorRT are in `topw_deploy.tensorrt.run`.

The rest:
sampler: the public class for logits from elsewhere.
results: public results, with the log-probabilities of tokens.
rule_settings: comparison of rules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from topw_deploy import install
from topw_deploy.errors import MissingPackageError

if TYPE_CHECKING:
    from topw_deploy.runtime.model import TopWModel
    from topw_deploy.runtime.results import GenerationResult, Piece, Timings, TokenLogprob, TopLogprob
    from topw_deploy.runtime.sampler import Samples, TopWSampler

__all__ = [
    "GenerationResult",
    "Piece",
    "Samples",
    "Timings",
    "TokenLogprob",
    "TopLogprob",
    "TopWModel",
    "TopWSampler",
]

_MODULES = {"TopWModel": "model", "TopWSampler": "sampler", "Samples": "sampler"}  # others: results


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the table of parameters does not load onnxruntime."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'results')}"), name)
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        raise MissingPackageError(install.missing_message("running a model", "cpu"), name="onnxruntime") from None
