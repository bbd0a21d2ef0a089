"""Keep streams of completions running on a server with OpenAI's API, and record when each text arrived."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import httpx2

PATH = "/v1/completions"
_PAUSE = 0.1  # seconds after a refused request


@dataclass
class Answer:
    """One streamed completion. The caller passes each line and its time of arrival to `feed`, and then calls `close`.

    asked: time of the request.
    limit: maximum number of tokens.
    texts: times at which parts of the text arrived. A part is the text of one token or of several.
    error: the kind of error, in a few words, or None.
    ended: whether the server ended the stream.
    """

    asked: float
    limit: int
    texts: list[float] = field(default_factory=list)
    error: str | None = None
    ended: bool = False
    _reason: str | None = None
    _counted: int | None = None

    def feed(self, line: str, now: float) -> None:
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self.ended = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            self.error = "an event is not JSON"
            return
        if "error" in chunk:
            self.error = "an error in the stream"
            return
        self._counted = (chunk.get("usage") or {}).get("completion_tokens", self._counted)
        for choice in chunk.get("choices") or ():
            if choice.get("text"):
                self.texts.append(now)
            self._reason = choice.get("finish_reason") or self._reason

    def close(self) -> None:
        """Record that the stream has ended. Without a finish reason, that is an error."""
        if self.error is None and self._reason is None:
            self.error = "the stream ended early"
        self.ended = self.ended or self.error is None

    @property
    def tokens(self) -> int:
        """The server's count of tokens; without one, `limit` if the stream ended for its length, else the parts."""
        if self._counted is not None and self.ended:
            return self._counted
        return self.limit if self._reason == "length" else len(self.texts)

    @property
    def gaps(self) -> Iterator[float]:
        """Seconds between successive parts of the text."""
        return (later - earlier for earlier, later in zip(self.texts, self.texts[1:], strict=False))


@dataclass
class Turn:
    """The figures of one server under load.

    seconds: length of the load.
    requests: number of requests that ended without an error.
    tokens: tokens of all requests, those that were still running at the end included.
    first: seconds from a request to its first text.
    gaps: seconds between successive texts.
    errors: kind of error -> number of requests.
    """

    seconds: float
    requests: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(seconds: float, answers: list[Answer]) -> Turn:
    turn, errors = Turn(seconds), Counter[str]()
    for answer in answers:
        turn.requests += answer.ended and answer.error is None
        turn.tokens += answer.tokens
        turn.first += [answer.texts[0] - answer.asked] if answer.texts else []
        turn.gaps += answer.gaps
        if answer.error is not None:
            errors[answer.error] += 1
    turn.errors = dict(errors)
    return turn


async def run_load(
    client: httpx2.AsyncClient, body: Callable[[int], Mapping[str, Any]], streams: int, seconds: float
) -> Turn:
    """Keep `streams` requests running for some seconds, then drop those that still run.

    client: with the server's address; its limit of connections must not be below `streams`.
    body: the request of a number; has max_tokens. Numbers count from 0.
    """
    answers: list[Answer] = []
    numbers = count()
    began = time.perf_counter()
    callers = [asyncio.ensure_future(_call_again(client, body, numbers, answers)) for _ in range(streams)]
    done, running = await asyncio.wait(callers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    took = time.perf_counter() - began
    for caller in running:
        caller.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for caller in done:
        caller.result()  # raises a fault of ours
    return summarise(took, answers)


async def _call_again(
    client: httpx2.AsyncClient, body: Callable[[int], Mapping[str, Any]], numbers: Iterator[int], answers: list[Answer]
) -> None:
    while True:
        request = body(next(numbers))
        answer = Answer(time.perf_counter(), request["max_tokens"])
        answers.append(answer)
        try:
            async with client.stream("POST", PATH, json={**request, "stream": True}) as response:
                if response.status_code == 200:
                    async for line in response.aiter_lines():
                        answer.feed(line, time.perf_counter())
                    answer.close()
                else:
                    answer.error = f"status {response.status_code}"
        except httpx2.HTTPError as error:
            answer.error = type(error).__name__
        if answer.error is not None:
            await asyncio.sleep(_PAUSE)
