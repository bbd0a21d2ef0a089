"""/topw/inspect: how one token of an answer was chosen."""

from __future__ import annotations

from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from anyio import CapacityLimiter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.errors import ManifestError
from topw_deploy.runtime.logprobs import Logits
from topw_deploy.runtime.outputs import gives_logits
from topw_deploy.runtime.token_geometry import read_geometry
from topw_deploy.sampling import Geometry
from topw_deploy.serve.failures import invalid_request
from topw_deploy.serve.inspection import InspectedStep, StepExplanation
from topw_deploy.serve.schemas.inspect import InspectRequest
from topw_deploy.serve.service import Served
from topw_deploy.serve.stream import Run, read_body

_WITHOUT_EFFECT = frozenset(
    {
        *("num_return_sequences", "skip_special_tokens", "add_special_tokens", "logprobs", "prompt_logprobs"),
        *("max_new_tokens", "max_length"),
    }
)


class Inspector:
    """Explains steps of one model, one at a time.

    limiter: of the one thread that explains.
    """

    def __init__(self, served: Served) -> None:
        self._model = served.model
        self.limiter = CapacityLimiter(1)

    @cached_property
    def _geometry(self) -> tuple[Geometry | None, str | None]:
        """Returns (the model's geometry, None), or (None, the reason why it cannot be read)."""
        try:
            return read_geometry(self._model.path, self._model.manifest), None
        except ManifestError as error:
            return None, str(error)

    def explain(self, step: InspectedStep, logits: Logits) -> dict[str, Any]:
        """The explanation as JSON. Takes about as long as sorting the logits.

        logits: of the step, float32 [V].
        """
        model = self._model
        geometry, why_none = self._geometry
        options = model.manifest.sampler.options
        return StepExplanation(step, logits, options, geometry, model.tokenizer.text_of, why_none).as_dict()


_inspectors: WeakKeyDictionary[Served, Inspector] = WeakKeyDictionary()


async def inspect(request: Request) -> Response:
    """Recompute the step that drew a token, and explain its kept sets."""
    body = await read_body(request, InspectRequest)
    run = Run(request, body, "inspect", "prompt_token_ids")
    served = run.served
    with run.naming_fields():
        step = _inspected_step(body, served)
    if not gives_logits(served.model.manifest):
        raise invalid_request(
            f"{served.name} was exported without logits, so no step can be recomputed; export it again with "
            "--with-logits.",
            code="no_logits",
            status=422,
        )
    inspector = _inspectors.setdefault(served, Inspector(served))
    logits = await run.logits([*step.request.prompt, *step.drawn])
    answer = await run.prepare(lambda: inspector.explain(step, logits), inspector.limiter)
    if answer["distances_unavailable"]:
        answer["distances_unavailable"] = served.without_path(answer["distances_unavailable"])
    return JSONResponse({"model": served.name, **answer})


def _inspected_step(body: InspectRequest, served: Served) -> InspectedStep:
    """Find the step in the request. Raises RequestError, ParameterError and PromptError if it cannot be recomputed."""
    parameters = {name: value for name, value in body.parameters().items() if name not in _WITHOUT_EFFECT}
    if body.position >= len(body.token_ids):
        raise invalid_request(
            f"position is {body.position}, but token_ids has {len(body.token_ids)} tokens; count from 0.", "position"
        )
    drawn = body.token_ids[: body.position]
    vocab = served.model.manifest.sampler.vocab_size
    unknown = next((token for token in body.token_ids if token >= vocab), None)
    if unknown is not None:
        raise invalid_request(f"token_ids has {unknown}, but ids go from 0 to {vocab - 1}.", "token_ids")
    served.check_length([*body.prompt_token_ids, *drawn])
    request = served.resolve(body.prompt_token_ids, {**parameters, "max_new_tokens": 1})
    token = body.token_ids[body.position]
    return InspectedStep(request, body.sample, tuple(drawn), token, has_seed="seed" in parameters)
