"""Run exported models with numpy, onnxruntime, tokenizers and minijinja.

A call of `TopWModel.generate` crosses these modules:
model: the public class.
prompts, tokenizer: a prompt and its token ids.
request, limits, parameters: the parameters of each row, and what the model allows.
loop: prefill and decode steps.
rows: what each row has drawn, its text and its end.
row_inputs, edits: the sampler's inputs for each row.
cache.in_place, cache.buffers: key-value caches and their memory; for a cache of the form `concat`, cache.concat.
ort.session: runs of the graph; on a device, ort.device_binding.
text: the text of the drawn tokens.

Other modules read what a request may add:
rules, generation_config: sampling rules, transformers' settings.
callbacks, logprobs, structured: streamers and stopping criteria, log-probabilities, schemas and grammars.
chat, tools: chat templates, tool calls.

Others open a model:
folder: files that the manifest lists.
protocols, session_options, open_session, ort: sessions; those of TensorRT are in `topw_deploy.tensorrt.run`.
device_lock: access to a device.

The rest:
sampler: the public class for logits from elsewhere.
results: public results.
token_geometry, rule_settings: inspection of steps, comparison of rules.
"""

from topw_deploy import install, telemetry
from topw_deploy.errors import MissingPackageError

try:
    telemetry.switch_off()
    import onnxruntime as _onnxruntime  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "onnxruntime":
        raise
    raise MissingPackageError(install.missing_message("running a model", "cpu"), name="onnxruntime") from None

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
