"""The two sides that answer problems: an exported model in `Engine`, and transformers' `generate`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.sums.problems import Problem
from topw_deploy.engine import Engine
from topw_deploy.errors import ParameterError
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling.parameters import PARAMETER_NAMES

NEW_TOKENS = 184  # the longest true answer has about 160 tokens, the context 256
GREEDY = "greedy"
WARPERS = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_OFF = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class RuleChoice:
    """A rule with its parameters, from the command line.

    label: the text that was given.
    parameters: the parameters of `generate`. Without `rule`, a rule's parameter implies the rule; none means Top-W.
    """

    label: str
    parameters: Mapping[str, Any]

    @staticmethod
    def parse(text: str) -> RuleChoice:
        """Read `min_p=0.1`, `top_w`, `top_w,lam=2.2,beta=2.8`, `top_h=0.4,top_h_pool=100`, `none` or `greedy`.

        Raises ParameterError for another form.
        """
        parameters: dict[str, Any] = {}
        for place, part in enumerate(text.split(",")):
            name, sign, value = part.partition("=")
            if not name.isidentifier() or (sign and not value) or (place and not sign):
                raise ParameterError(
                    f"the rule {text!r:.60} is not a rule's name or parameter=value, with any further parameter=value "
                    "after commas; see --help."
                )
            if sign:
                parameters[name] = _parse_number(value)
            elif name != "top_w":  # the default
                parameters["rule"] = name
        return RuleChoice(text, parameters)

    @property
    def greedy(self) -> bool:
        return self.parameters.get("rule") == GREEDY

    @property
    def top_w(self) -> bool:
        return set(self.parameters) <= {*PARAMETER_NAMES, "preset"}


def _parse_number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class Reply:
    """One generated text.

    tokens: number of generated tokens.
    kept: mean size of its crops; None if unknown.
    """

    text: str
    tokens: int
    kept: float | None


class Side(Protocol):
    """Answers problems."""

    def replies(self, asked: Sequence[Problem], rule: RuleChoice, temperature: float, seed: int) -> list[Reply]:
        """One reply per problem. For a seed, every rule and temperature gets the same random numbers."""

    def close(self) -> None:
        """Free memory and threads."""


class EngineSide:
    """An exported model in the batching engine.

    folder: written by `topw-export`.
    batch: number of rows that run at once.
    """

    def __init__(self, folder: Path, batch: int, threads: int | None) -> None:
        self._model = TopWModel.from_pretrained(folder, intra_op_num_threads=threads)
        self._engine = Engine(self._model, max_batch=batch, when_full="wait", max_length=256)

    def replies(self, asked: Sequence[Problem], rule: RuleChoice, temperature: float, seed: int) -> list[Reply]:
        parameters = {"temperature": 0.0} if rule.greedy else {**rule.parameters, "temperature": temperature}
        requests = [
            self._engine.submit(p.prompt, max_new_tokens=NEW_TOKENS, seed=seed * _SEED_STRIDE + place, **parameters)
            for place, p in enumerate(asked)
        ]
        results = [request.result() for request in requests]
        return [Reply(r.text, len(r.token_ids), statistics.fmean(r.kept)) for r in results]

    def close(self) -> None:
        self._engine.shutdown()
        self._model.close()


class TorchSide:
    """The trained model in transformers' `generate`, with its own warpers, and `TopWLogitsProcessor` for Top-W."""

    def __init__(self, folder: Path, batch: int, threads: int | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if threads:
            torch.set_num_threads(threads)
        self._torch, self._batch = torch, batch
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def replies(self, asked: Sequence[Problem], rule: RuleChoice, temperature: float, seed: int) -> list[Reply]:
        arguments = self._arguments(rule, temperature)
        self._torch.manual_seed(seed)
        found = []
        for start in range(0, len(asked), self._batch):
            found += self._generate([p.prompt for p in asked[start : start + self._batch]], arguments)
        return found

    def close(self) -> None:
        """Nothing to free."""

    def _generate(self, prompts: list[str], arguments: Mapping[str, Any]) -> list[Reply]:
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        with self._torch.no_grad():
            ids = self._model.generate(**inputs, max_new_tokens=NEW_TOKENS, **arguments)
        new = ids[:, inputs["input_ids"].shape[1] :]
        texts = self._tokenizer.batch_decode(new, skip_special_tokens=True)
        lengths = (new != self._tokenizer.pad_token_id).sum(1).tolist()
        return [Reply(text, length, None) for text, length in zip(texts, lengths, strict=True)]

    def _arguments(self, rule: RuleChoice, temperature: float) -> dict[str, Any]:
        if rule.greedy:
            return {"do_sample": False, **_OFF, "top_k": None, "top_p": None}
        if rule.top_w:
            from topw_deploy.sampling.processor import TopWLogitsProcessor

            topw = TopWLogitsProcessor(self._model, temperature=temperature, **rule.parameters)
            return topw.generate_arguments()
        warpers = {name: value for name, value in rule.parameters.items() if name != "rule"}
        unknown = [name for name in warpers if name not in WARPERS]
        if unknown or (not warpers and rule.parameters.get("rule") != "none"):
            raise ParameterError(
                f"transformers has no warper for {rule.label}; remove it from --rules, or remove --torch "
                f"(warpers: {', '.join(WARPERS)})."
            )
        return {"do_sample": True, "temperature": temperature, **_OFF, **warpers}
