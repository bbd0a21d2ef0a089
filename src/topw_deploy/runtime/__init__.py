"""Run exported models with numpy, onnxruntime, tokenizers and jinja2.

model, sampler, results: public classes.
prompts, parameters, bad_words, generation_config, request: request validation.
loop, rows, record, draws, edits, allowed, logprobs, callbacks: generation.
next_logits, token_geometry: what a step is recomputed from.
structured: answers that match a schema or a grammar.
text, tokenizer, token_bound, chat, template: text, tokens, chat templates.
tools: tool calls.
cache, memory: key-value caches.
protocols, session_options, open_session, device_lock: session interface.
ort: onnxruntime sessions; TensorRT's are in `topw_deploy.tensorrt.run`.
"""

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
