"""/v1/completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from topw_deploy.runtime import GenerationResult, Piece, TokenLogprob, TopLogprob
from topw_deploy.runtime.tokenizer import REPLACEMENT
from topw_deploy.serve.failures import RequestError
from topw_deploy.serve.schemas import CompletionRequest
from topw_deploy.serve.stream import Run, answer_choices, ending_fields, finite, read_body

NEW_TOKENS = 16
"""Maximum number of tokens of a completion whose request states no length, as in OpenAI's API."""


async def completions(request: Request) -> Response:
    """Continue one or several prompts, whole or as a stream of chunks."""
    body = await read_body(request, CompletionRequest)
    run = Run(request, body, "cmpl", "prompt")

    sequences = await run.prepare(lambda: run.served.sequences(body.prompt, _parameters(body)))
    is_batch = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    given: Sequence[Any] = body.prompt if is_batch else [body.prompt]
    run.run(sequences, len(given), body.prompt)
    tokenizer, hidden = run.served.model.tokenizer, sequences[0].params.hidden_tokens
    bytes_of = partial(tokenizer.bytes_of, hidden=hidden)
    decode = lambda prompt: tokenizer.decode([token for token in prompt if token not in hidden], False)  # noqa: E731
    texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in given] if body.echo else []
    offsets: dict[int, _Offsets] = {}  # of the choices that have chunks

    def whole_choice(index: int, result: GenerationResult) -> dict[str, Any]:
        prompt, echoed = sequences[index].prompt, texts[index // run.samples] if texts else ""
        entries: Sequence[TokenLogprob | None] | None = result.token_logprobs
        if result.prompt_logprobs is not None:
            entries = [*result.prompt_logprobs, *(entries or ())]
        places = _Offsets(bytes_of, echoed, tokenizer.special_ids)
        logprobs = _logprobs(entries, places, prompt[0], tokenizer.text_of(prompt[0]))
        ids = {"prompt_token_ids": prompt, "token_ids": result.token_ids} if run.returns_ids else {}
        end = ending_fields(result, per_token=run.returns_ids)
        return {"index": index, "text": echoed + result.text, "logprobs": logprobs, **ids, **end}

    def chunk(
        index: int, text: str, entries: Any = None, tokens: Sequence[int] = (), end: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        ids: dict[str, Any] = {"token_ids": list(tokens)} if run.returns_ids else {}
        if run.returns_ids and index not in offsets:  # only in the first chunk of a choice
            ids["prompt_token_ids"] = sequences[index].prompt
        logprobs = _logprobs(entries, offsets.setdefault(index, _Offsets(bytes_of, "", {})))
        end = end or {"finish_reason": None}
        return {"choices": [{"index": index, "text": text, "logprobs": logprobs, **ids, **end}]}

    def chunks(piece: Piece) -> Iterator[dict[str, Any]]:
        if texts and piece.row not in offsets:
            yield chunk(piece.row, texts[piece.row // run.samples])
        end = None if piece.result is None else ending_fields(piece.result, per_token=run.returns_ids)
        yield chunk(piece.row, piece.text, piece.token_logprobs, piece.token_ids, end)

    head = {"id": run.id, "object": "text_completion", "created": run.created, "model": run.served.name}
    return await answer_choices(run, head, whole_choice, chunks)


def _parameters(body: CompletionRequest) -> dict[str, Any]:
    parameters = body.parameters()
    if not {"max_new_tokens", "max_length"} & parameters.keys():
        parameters["max_new_tokens"] = NEW_TOKENS
    if body.echo and "logprobs" in parameters:
        if body.stream:
            raise RequestError("a stream cannot echo with logprobs; omit echo, logprobs or stream.", "echo")
        parameters.setdefault("prompt_logprobs", parameters["logprobs"])
    elif "prompt_logprobs" in parameters:
        message = "prompt_logprobs is given without echo and logprobs; add both to get them."
        raise RequestError(message, "prompt_logprobs")
    return parameters


class _Offsets:
    """Counts the characters before each token of a text, whole or not.

    bytes_of: a function from a token to its bytes in the text.
    echoed: the prompt with which the text begins. It may name special tokens, and lack those that the tokenizer adds.
    names: of the special tokens.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], echoed: str, names: Mapping[int, str]) -> None:
        self._bytes_of, self._at, self._echoed, self._names = bytes_of, 0, echoed, names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token: int) -> int:
        """The number of characters before the next token."""
        name = self._names.get(token) if self._at < len(self._echoed) else None
        is_cut = bool(self._decoder.getstate()[0])  # the tokens before end within a character
        shown = self._decoder.decode(self._bytes_of(token) if name is None else name.encode())
        if is_cut and shown.startswith(REPLACEMENT):
            self._at, shown = self._at + 1, shown[1:]
        if self._at < len(self._echoed) and not self._echoed.startswith(shown, self._at):
            # Special tokens may take the white space around them, and the first token of a text may lose its own.
            rest = self._echoed[self._at :].lstrip()
            if rest.startswith(shown.lstrip()):
                self._at, shown = len(self._echoed) - len(rest), shown.lstrip()
            elif name is not None:
                shown = ""
        self._at += len(shown)
        return self._at - len(shown)


def _logprobs(
    entries: Sequence[TokenLogprob | None] | None, offsets: _Offsets, first: int = 0, first_text: str = ""
) -> dict[str, Any] | None:
    """`logprobs` of a completion's choice; None without entries.

    entries: of the tokens in order; None for the first token of a prompt, which has no log-probability.
    first, first_text: that first token.
    """
    if entries is None:
        return None
    return {
        "tokens": [first_text if one is None else one.text for one in entries],
        "token_logprobs": [None if one is None else finite(one.logprob) for one in entries],
        "top_logprobs": [None if one is None else _alternatives(one) for one in entries],
        "text_offset": [offsets.take(first if one is None else one.token_id) for one in entries],
    }


def _alternatives(one: TokenLogprob) -> dict[str, float]:
    """Log-probabilities of the likeliest tokens and of the drawn one. Of equal texts, the likeliest counts."""
    found: dict[str, float] = {}
    entries: list[TokenLogprob | TopLogprob] = [*one.top_logprobs, one]
    for each in entries:
        found.setdefault(each.text, finite(each.logprob))
    return found
