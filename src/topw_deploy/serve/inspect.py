"""/topw/inspect: how one token of an answer was chosen."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from anyio import CapacityLimiter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.errors import ManifestError
from topw_deploy.runtime.logprobs import Logits, gives_logits
from topw_deploy.runtime.token_geometry import read_geometry
from topw_deploy.sampling import Geometry
from topw_deploy.serve.failures import invalid
from topw_deploy.serve.inspection import Explained, Step
from topw_deploy.serve.parameters import OF_REQUEST
from topw_deploy.serve.requests import read, service_of
from topw_deploy.serve.run import Run
from topw_deploy.serve.schemas.inspect import InspectRequest
from topw_deploy.serve.served import Served

_WITHOUT_EFFECT = frozenset({*OF_REQUEST, "logprobs", "prompt_logprobs", "max_new_tokens", "max_length"})


class Inspector:
    """Explains steps of one model, one at a time."""

    def __init__(self, served: Served) -> None:
        self._model = served.model
        self.limiter = CapacityLimiter(1)

    @cached_property
    def _geometry(self) -> tuple[Geometry | None, str | None]:
        """The model's geometry, or None and the reason."""
        try:
            return read_geometry(self._model.path, self._model.manifest), None
        except ManifestError as error:
            return None, str(error)

    def explain(self, step: Step, logits: Logits) -> dict[str, Any]:
        """The answer. logits: float32 [V], of the step. Takes about as long as sorting them."""
        model = self._model
        geometry, why = self._geometry
        options = model.manifest.sampler.options
        return Explained(step, logits, options, geometry, model.tokenizer.text_of, why).as_dict()


_inspectors: WeakKeyDictionary[Served, Inspector] = WeakKeyDictionary()


async def inspect(request: Request) -> Response:
    """Recompute the step that drew a token."""
    body = await read(request, InspectRequest)
    run = Run(request, service_of(request), body, "inspect", "prompt_token_ids")
    served = run.served
    with run.naming():
        step = _step(body, served)
    if not gives_logits(served.model.manifest):
        raise invalid(
            f"{served.name} was exported without logits, so no step can be recomputed; export it again with "
            "--with-logits.",
            code="no_logits",
            status=422,
        )
    inspector = _inspectors.setdefault(served, Inspector(served))
    logits = await run.logits([*step.request.prompt, *step.drawn])
    answer = await run.prepare(lambda: inspector.explain(step, logits), inspector.limiter)
    if answer["distances_unavailable"]:
        answer["distances_unavailable"] = served.plain(answer["distances_unavailable"])
    return JSONResponse({"model": served.name, **answer})


def _step(body: InspectRequest, served: Served) -> Step:
    """Raises RequestError, ParameterError and PromptError for a step that cannot be recomputed."""
    parameters = {name: value for name, value in body.parameters().items() if name not in _WITHOUT_EFFECT}
    if body.position >= len(body.token_ids):
        raise invalid(
            f"position is {body.position}, but token_ids has {len(body.token_ids)} tokens; count from 0.", "position"
        )
    drawn = body.token_ids[: body.position]
    vocab = served.model.manifest.sampler.vocab_size
    unknown = next((token for token in body.token_ids if token >= vocab), None)
    if unknown is not None:
        raise invalid(f"token_ids has {unknown}, but ids go from 0 to {vocab - 1}.", "token_ids")
    served.check([*body.prompt_token_ids, *drawn])
    request = served.resolve(body.prompt_token_ids, {**parameters, "max_new_tokens": 1})
    step = replace(request, sample=body.sample)
    return Step(step, tuple(drawn), body.token_ids[body.position], seeded="seed" in parameters)
