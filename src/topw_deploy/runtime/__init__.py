"""Run exported models with numpy, onnxruntime, tokenizers and jinja2.

A call of `TopWModel.generate` crosses these modules:
model: the public class.
prompts, tokenizer: a prompt and its token ids.
request, parameters: the parameters of each row.
loop: prefill and steps.
rows, row_inputs: what each row draws, and what it feeds the sampler.
cache.in_place, cache.buffers: key-value caches and their memory; those of the form `concat`, cache.concat.
ort.session: runs of the graph; on a device, ort.device_binding.
text: the text of the drawn tokens.

Others are for what a request may add:
rules, generation_config: sampling rules, transformers' settings.
edits, callbacks, logprobs, structured: penalties and bans, streamers, log-probabilities, schemas and grammars.
chat, template, tools: chat templates, tool calls.

And for opening a model:
folder, token_bound, token_growth, device_lock: files, bounds of a tokenizer, access to a device.
protocols, session_options, open_session, ort: sessions; TensorRT's are in `topw_deploy.tensorrt.run`.

sampler: `TopWSampler`. results: public results. next_logits, token_geometry, rule_settings: inspection, comparisons.
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
