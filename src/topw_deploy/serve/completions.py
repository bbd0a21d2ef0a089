"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.runtime import GenerationResult
from topw_deploy.serve.bodies import read_body
from topw_deploy.serve.choices import completion_logprobs, ending_fields
from topw_deploy.serve.events import DONE, EventStream, json_event, record_failure
from topw_deploy.serve.failures import invalid_request
from topw_deploy.serve.run import Run
from topw_deploy.serve.schemas.generation import CompletionRequest, StreamOptions
from topw_deploy.serve.served import Pieces, Served
from topw_deploy.serve.service import service_of

NEW_TOKENS = 16
"""Maximum number of tokens of a completion whose request states no length, as in OpenAI's API."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a request.

    ids: token ids of each prompt.
    texts: text of each prompt; None unless the answer repeats the prompt.
    """

    ids: list[list[int]]
    texts: list[str] | None

    @property
    def for_engine(self) -> list[int] | list[list[int]]:
        """The token ids as the engine takes them: of one prompt, or of a batch."""
        return self.ids[0] if len(self.ids) == 1 else self.ids


async def completions(request: Request) -> Response:
    """Continue one or several prompts, whole or as a stream of chunks."""
    body = await read_body(request, CompletionRequest)
    run = Run(request, service_of(request), body, "cmpl", "prompt")
    parameters, prompts = await run.prepare(lambda: _prepare(body, run.served))
    run.prompt_tokens = sum(map(len, prompts.ids))
    run.log_prompt(body.prompt)
    if run.is_stream:
        pieces = await run.begin_stream(prompts.for_engine, parameters)
        events = _stream_events(run, prompts, pieces, body.stream_options or StreamOptions())
        return EventStream(events, partial(run.close_stream, pieces), run.options)
    results = await run.generate(prompts.for_engine, parameters)
    choices = [_choice(index, result, run, prompts) for index, result in enumerate(results)]
    return JSONResponse({**_answer_fields(run), "choices": choices, "usage": run.usage})


def _answer_fields(run: Run) -> dict[str, Any]:
    return {"id": run.id, "object": "text_completion", "created": run.created, "model": run.served.name}


def _prepare(body: CompletionRequest, served: Served) -> tuple[dict[str, Any], Prompts]:
    """Returns (the engine's parameters, the prompts). Slow: call it in a thread."""
    parameters = _parameters(body)
    return parameters, _read_prompts(body, served, parameters.pop("add_special_tokens", True))


def _parameters(body: CompletionRequest) -> dict[str, Any]:
    parameters = body.parameters()
    if not {"max_new_tokens", "max_length"} & parameters.keys():
        parameters["max_new_tokens"] = NEW_TOKENS
    if body.echo and "logprobs" in parameters:
        if body.stream:
            raise invalid_request("a stream cannot echo with logprobs; omit echo, logprobs or stream.", "echo")
        parameters.setdefault("prompt_logprobs", parameters["logprobs"])
    elif "prompt_logprobs" in parameters:
        raise invalid_request(
            "prompt_logprobs is given without echo and logprobs; add both to get them.", "prompt_logprobs"
        )
    return parameters


def _read_prompts(body: CompletionRequest, served: Served, add_special_tokens: bool) -> Prompts:
    given: Any = body.prompt
    is_batch = isinstance(given, list) and not isinstance(given[0], int)
    prompts: Sequence[str | list[int]] = given if is_batch else [given]
    served.check_prompt_count(len(prompts))
    ids = [
        served.encode(each, add_special_tokens) if isinstance(each, str) else served.check_length(each)
        for each in prompts
    ]
    texts = None
    if body.echo:
        texts = [e if isinstance(e, str) else served.model.tokenizer.decode(e) for e in prompts]
    return Prompts(ids, texts)


def _choice(index: int, result: GenerationResult, run: Run, prompts: Prompts) -> dict[str, Any]:
    text, logprobs = result.text, completion_logprobs(result.token_logprobs)
    with_ids = run.returns_ids
    if prompts.texts is not None:
        prompt = prompts.texts[index // run.samples]
        text = prompt + text
        if result.prompt_logprobs is not None:
            first = run.served.model.tokenizer.text_of(prompts.ids[index // run.samples][0])
            entries = [*result.prompt_logprobs, *(result.token_logprobs or ())]
            logprobs = completion_logprobs(entries, first=first)
    ids = {"prompt_token_ids": prompts.ids[index // run.samples], "token_ids": result.token_ids} if with_ids else {}
    return {"index": index, "text": text, "logprobs": logprobs, **ids, **ending_fields(result, per_token=with_ids)}


async def _stream_events(
    run: Run, prompts: Prompts, pieces: Pieces, options: StreamOptions
) -> AsyncGenerator[ServerSentEvent, None]:
    lengths: dict[int, int] = {}
    with_ids = run.returns_ids

    def chunk(
        index: int, text: str, entries: Any, end: Mapping[str, Any] | None, tokens: Sequence[int] = ()
    ) -> ServerSentEvent:
        logprobs = completion_logprobs(entries, offset=lengths.get(index, 0))
        ids: dict[str, Any] = {"token_ids": list(tokens)} if with_ids else {}
        if with_ids and index not in lengths:  # only in the first chunk of a choice
            ids["prompt_token_ids"] = prompts.ids[index // run.samples]
        lengths[index] = lengths.get(index, 0) + len(text)
        choice = {"index": index, "text": text, "logprobs": logprobs, **ids, **(end or {"finish_reason": None})}
        return json_event({**_answer_fields(run), "choices": [choice], **run.usage_field(options)})

    try:
        async for piece in run.count_pieces(pieces):
            if prompts.texts is not None and piece.row not in lengths:
                yield chunk(piece.row, prompts.texts[piece.row // run.samples], None, None)
            end = None if piece.result is None else ending_fields(piece.result, per_token=with_ids)
            yield chunk(piece.row, piece.text, piece.token_logprobs, end, piece.token_ids)
        if options.include_usage:
            yield json_event({**_answer_fields(run), "choices": [], "usage": run.usage})
    except Exception as error:  # noqa: BLE001  # the status was already sent
        yield json_event(record_failure(error, run.log_entry))
    yield DONE
