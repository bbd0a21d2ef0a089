"""What `topw bench decode` can be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from topw_deploy.bench.process import require_few_threads
from topw_deploy.errors import ParameterError

_FEWEST_NEW = 2  # the first token is prefill's


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """folder: an export of this project. threads: the runs to make, one after the other. transformers, optimum, genai:
    folders with the same weights in the other libraries' formats, with the interpreters of their environments.
    authors: their processor's file. peers: names of sides, [] for all.

    Raises ParameterError for what is out of its interval.
    """

    folder: Path
    prompt_tokens: int = 128
    new_tokens: int = 64
    threads: Sequence[int] = (1,)
    transformers: Path | None = None
    optimum: Path | None = None
    optimum_python: Path | None = None
    genai: Path | None = None
    genai_python: Path | None = None
    authors: Path | None = None
    peers: Sequence[str] = ()
    rounds: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("new_tokens", _FEWEST_NEW), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ParameterError(f"{name} is {getattr(self, name)}, but must be an integer >= {least}.", name)
        require_few_threads(self.threads)
        if self.authors is not None and self.transformers is None:
            raise ParameterError(
                "the authors' processor runs in transformers; give the model's folder by --transformers.",
                "authors",
            )
