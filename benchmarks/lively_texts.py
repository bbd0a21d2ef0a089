"""The texts of `benchmarks.lively`, and how likely, varied and repetitive they are.

The bundled model continues `examples/prompts.txt` with Top-W in the exported model and other samplers in transformers'
`generate`. The prompts' true continuations are measured too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from topw_deploy.runtime import TopWModel
from topw_deploy.tiny import tiny_model_path
from topw_deploy.tiny.corpus import gather_corpus

PROMPTS = Path(__file__).parents[1] / "examples" / "prompts.txt"
NGRAM = 4  # tokens per counted repetition

_WORD = re.compile(r"[A-Za-z]{2,}")
_NO_TRUNCATION = {"top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and its continuation."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Measures:
    """One sampler's continuations with one seed.

    tokens: number of tokens.
    logprob: mean log probability per token under the model at temperature 1, in nats.
    distinct: share of different pairs among adjacent tokens.
    repeated: share of 4-grams seen before in the same text.
    words: share of words in the corpus.
    """

    tokens: int
    logprob: float
    distinct: float
    repeated: float
    words: float


class Writer:
    """The bundled float32 model, its tokenizer, the 24 prompts and the corpus."""

    def __init__(self, new_tokens: int) -> None:
        folder = tiny_model_path()
        self.new_tokens = new_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.embeddings: NDArray[np.float32] = self.model.get_input_embeddings().weight.detach().numpy()
        self.prompts = PROMPTS.read_text("utf-8").splitlines()
        corpus = gather_corpus()
        self._held_out = corpus.held_out
        self._words = set(_WORD.findall("\n".join((*corpus.train, *corpus.held_out))))

    def top_w(self, model: TopWModel, parameters: Mapping[str, float], seed: int) -> list[Text]:
        """By the exported model, one prompt at a time like `topw generate`."""
        texts = []
        for prompt in self.prompts:
            result = model.generate(prompt, max_new_tokens=self.new_tokens, seed=seed, **parameters)
            texts.append(Text(self._ids(prompt), tuple(result.token_ids)))
        return texts

    def transformers(self, arguments: Mapping[str, Any], seed: int) -> list[Text]:
        """By transformers' `generate`; arguments: such as top_p."""
        torch.manual_seed(seed)
        texts = []
        for prompt in self.prompts:
            ids = self._ids(prompt)
            given: dict[str, Any] = {"do_sample": True, **_NO_TRUNCATION, **arguments}
            with torch.no_grad():
                found = self.model.generate(torch.tensor([ids]), max_new_tokens=self.new_tokens, **given)
            texts.append(Text(ids, tuple(found[0, len(ids) :].tolist())))
        return texts

    def documentation(self) -> list[Text]:
        """The true continuations."""
        texts = []
        for prompt in self.prompts:
            spaced = re.compile(r"\s+".join(map(re.escape, prompt.split())))
            found = (match for document in self._held_out for match in [spaced.search(document)] if match)
            match = next(found)
            ids = self.tokenizer(match.string[match.end() :], add_special_tokens=False).input_ids
            texts.append(Text(self._ids(prompt), (*ids, self.tokenizer.eos_token_id)[: self.new_tokens]))
        return texts

    def logits(self, text: Text) -> NDArray[np.float32]:
        """Logits [tokens, V] from which the continuation's tokens were drawn."""
        ids = torch.tensor([[*text.prompt, *text.tokens]])
        with torch.no_grad():
            rows: NDArray[np.float32] = self.model(input_ids=ids).logits[0].numpy()
        return rows[len(text.prompt) - 1 : -1]

    def measures(self, texts: Sequence[Text]) -> Measures:
        logprobs: list[float] = []
        for text in texts:
            rows = torch.from_numpy(self.logits(text)).log_softmax(-1)
            logprobs += rows[torch.arange(len(text.tokens)), list(text.tokens)].tolist()
        words = [word for text in texts for word in _WORD.findall(self.tokenizer.decode(text.tokens))]
        pairs = [pair for text in texts for pair in _ngrams(text.tokens, 2)]
        known = sum(word in self._words for word in words)
        return Measures(
            tokens=len(logprobs),
            logprob=float(np.mean(logprobs)),
            distinct=len(set(pairs)) / len(pairs),
            repeated=_repeated_share(texts),
            words=known / len(words),
        )

    def _ids(self, prompt: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(prompt).input_ids)


def shared_ngrams(one: Sequence[Text], other: Sequence[Text]) -> float:
    """Share of the 4-grams of `one` that `other` also has for the same prompt."""
    both = total = 0
    for a, b in zip(one, other, strict=True):
        theirs = set(_ngrams(b.tokens, NGRAM))
        mine = _ngrams(a.tokens, NGRAM)
        both += sum(gram in theirs for gram in mine)
        total += len(mine)
    return both / total


def _repeated_share(texts: Sequence[Text]) -> float:
    grams = [_ngrams(text.tokens, NGRAM) for text in texts]
    total = sum(map(len, grams))
    return 1 - sum(len(set(found)) for found in grams) / total


def _ngrams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
