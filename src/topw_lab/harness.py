"""A model class for lm-evaluation-harness, registered as `topw_deploy` (docs/guide/evaluation.md), and its command.

Importing this module registers `TopWHarness`, so that `lm_eval.simple_evaluate(model="topw_deploy", ...)` finds it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy import install
from topw_deploy.errors import ParameterError, PromptError, TokenizerError, TopWError, one_line
from topw_deploy.manifest import MANIFEST_NAME, sha256_of
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.loop import logits_output
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS, integer, read_values, unknown_parameter_error
from topw_deploy.runtime.prepare import has_no_effect
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.seeds import SEED_BITS, prompt_seed
from topw_lab.running import PromptRequest, Runner

install.require("evaluating", "lm-eval")

import lm_eval.models  # noqa: E402, F401  # the harness registers its own models only into an empty registry
from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.api.registry import model_registry  # noqa: E402
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402
from tqdm import tqdm  # noqa: E402

NAME = "topw_deploy"
_log = logging.getLogger(__name__)
ScoredRequest = tuple[Any, list[int], list[int]]  # (the request's arguments or None, context ids, continuation ids)


class TopWHarness(TemplateLM):  # type: ignore[misc, unused-ignore]
    """A model of the harness: an exported folder, which generates and scores through the batching engine.

    arguments: those of `--model_args`; see docs/guide/evaluation.md.

    Raises ParameterError for an unknown or invalid argument, and the errors of `TopWModel.from_pretrained` and
    `Engine`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._arguments = given = Arguments(arguments)
        self._model = TopWModel.from_pretrained(given.path, **given.opening)
        # Raises for wrong parameters, before a long run.
        self._model.prepare([0], **{**given.parameters, "max_new_tokens": 1})
        context = self._model.manifest.decoder.context_length
        self._tokens = min(given.opening.get("max_length", context), context)
        engine = {**given.engine, **({"max_length": self._tokens} if "max_length" in given.opening else {})}
        self._runner = Runner(self._model, given.rows, **engine)
        # Whether the engine reuses the states of the tokens that begin an earlier prompt.
        reuses = self._runner.engine is not None and given.engine.get("reuse_prefixes") is not False
        self._reuses = reuses and not self._model.manifest.decoder.recurs
        # The harness seeds numpy's generator (--seed) before it creates the model.
        self._seed = int(np.random.randint(2**31 - 1)) if given.seed is None else given.seed
        self._warned: set[str] = set()

    def close(self) -> None:
        """End the engine's thread and free the cache."""
        self._runner.close()
        self._model.close()

    # Tokens

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return self._tokens

    @property
    def max_gen_toks(self) -> int:
        return self._arguments.max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS id, else the lowest one of the generation config. Raises TokenizerError without any."""
        found = self._model.tokenizer.eos_token_id
        if found is None:
            found = min(self._model.defaults["eos_token_id"], default=None)
        if found is None:
            raise TokenizerError(
                f"{self._model.path} has no EOS token, and scoring an empty context needs a BOS or an EOS token; give "
                "the tokenizer one and export again."
            )
        return int(found)

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that precedes a text without context: BOS, else EOS."""
        found = self._model.tokenizer.bos_token_id
        return self.eot_token_id if found is None else found

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids [n] of a text.

        add_special_tokens: None adds them unless the text begins with BOS, as a rendered chat does.
        """
        if add_special_tokens is None:
            bos = self._model.tokenizer.special_tokens.get("bos_token")
            begun = bos is not None and string.startswith(bos)
            add_special_tokens = self._arguments.parameters.get("add_special_tokens", not begun)
        return self._model.tokenizer.encode(string, add_special_tokens)

    # Chats

    @property
    def tokenizer_name(self) -> str:
        """The folder's name and digest, by which the harness stores prompts."""
        return f"{self._model.path.name}-{sha256_of(self._model.path / MANIFEST_NAME)[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the chat template. Raises ParameterError for a name, because a folder has one template."""
        if isinstance(chat_template, str):
            raise ParameterError(
                f"--apply_chat_template names the template {chat_template!r:.60}, but {self._model.path} has only one; "
                "give the option without a name."
            )
        template = self._model._template
        return template.source if chat_template and template is not None else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The rendered chat. Without `add_generation_prompt`, it ends with the text of the last message."""
        text = self._model.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt, **self._arguments.template
        )
        return text if add_generation_prompt else cut_after(text, chat_history[-1]["content"])

    # Generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers, each cut before the first occurrence of a text in the request's `until`."""
        seeds, end = Seeds(self._seed), self._arguments.think_end_token
        pairs = (request.args for request in requests)
        prompts = (self._prompt_request(context, given, seeds.next(context)) for context, given in pairs)
        texts = []
        results = tqdm(self._runner.results(prompts), total=len(requests), desc="Generating", disable=disable_tqdm)
        for request, result in zip(requests, results, strict=True):
            texts.append(result.text if end is None else result.text.split(end)[-1].lstrip())
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _prompt_request(self, context: str, gen_kwargs: Mapping[str, Any], seed: int) -> PromptRequest:
        given = self._arguments.parameters
        parameters = request_parameters(gen_kwargs, given, self.max_gen_toks, self._model.tokenizer)
        parameters.pop("add_special_tokens", None)  # applies to the prompt, which is encoded here
        stated = {name: gen_kwargs[name] for name in _WHETHER_GREEDY if name in gen_kwargs}
        if given.keys() & _WHETHER_GREEDY and stated:
            self._warn_once(f"--model_args overrides {stated} of the task.")
        elif parameters.get("temperature") == 0.0 and given.keys() & {*PARAMETER_NAMES, "preset", "rule"}:
            self._warn_once(
                "the task is greedy, so the sampler's parameters have no effect; give --model_args temperature."
            )
        most_prompt = self._tokens - parameters["max_new_tokens"]
        if most_prompt < 1:
            raise ParameterError(
                f"max_gen_toks is {parameters['max_new_tokens']}, but prompt and answer may have {self._tokens} tokens "
                "together; give --gen_kwargs max_gen_toks=N with a smaller N."
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        if len(ids) > most_prompt:
            self._warn_once(
                f"prompts of more than {most_prompt} tokens lose their beginning to leave room for the answer."
            )
        return ids[-most_prompt:], {**parameters, "seed": seed}

    # Log-likelihoods

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, computed in windows that fill the context."""
        windows: list[ScoredRequest] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._tokens - 1, 1)
            found = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += found
            counts.append(len(found))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        sums = []
        for request, count in zip(requests, counts, strict=True):
            sums.append(sum(next(scores)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoredRequest], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether it is the greedy one) for each request.

        A context that is too long loses its beginning. Raises ParameterError for a folder without logits, PromptError
        for a continuation longer than the context.
        """
        if logits_output(self._model.manifest) is None:
            raise ParameterError(
                f"log-likelihoods need the output logits, which the graph of {self._model.path} lacks; export it again "
                "with --with-logits."
            )
        if any(len(context) + len(continuation) > self._tokens for _, context, continuation in requests):
            self._warn_once(f"prompts and continuations of more than {self._tokens} tokens lose their beginning.")
        pairs = (request[1:] for request in requests if request[2])
        results = self._runner.results(itertools.chain.from_iterable(itertools.starmap(self._score_requests, pairs)))
        scores = []
        for arguments, _, continuation in tqdm(requests, desc="Scoring", disable=disable_tqdm):
            scores.append(_score(results, len(continuation)) if continuation else (0.0, True))
            if continuation and arguments is not None:
                self.cache_hook.add_partial("loglikelihood", arguments, scores[-1])
        return scores

    def _score_requests(self, context: Sequence[int], continuation: Sequence[int]) -> Iterable[PromptRequest]:
        """Requests that score a continuation in the faster of two ways.

        - One request per token of the continuation. It reads the tokens before this token in chunks, and draws this
          token as the only allowed one. All requests but the first reuse the tokens that the request before has read.
          This takes a run of one sequence per token of the continuation.
        - One request for `prompt_logprobs`. It reads context and continuation token by token, in steps of all
          sequences.
        """
        if len(continuation) >= self._tokens:
            raise PromptError(
                f"a continuation has {len(continuation)} tokens, but at most {self._tokens - 1} can be scored; shorten "
                "it."
            )
        whole = [*context, *continuation][-self._tokens :]
        start = len(whole) - len(continuation)
        rows = self._arguments.rows
        if len(continuation) > 1 and not (self._reuses and len(continuation) * rows <= len(whole)):
            return [(whole, {**_UNEDITED, "max_new_tokens": 0, "prompt_logprobs": 0})]
        one = {**_UNEDITED, "max_new_tokens": 1, "logprobs": 0}
        return [(whole[:end], {**one, "allowed_token_ids": whole[end : end + 1]}) for end in range(start, len(whole))]

    # Reports

    def get_model_info(self) -> dict[str, Any]:
        """Facts that the harness writes into its results, in addition to the arguments."""
        return {
            "topw_manifest_sha256": sha256_of(self._model.path / MANIFEST_NAME),
            "topw_defaults": self._model.manifest.stated_defaults,
            "topw_sampler": self._model.sampler,
            "topw_provider": self._model.provider,
            "topw_seed": self._seed,
        }

    def _warn_once(self, note: str) -> None:
        if note not in self._warned:
            self._warned.add(note)
            _log.warning(note)


def _score(results: Iterator[GenerationResult], continuation: int) -> tuple[float, bool]:
    """Take the results of one continuation of this many tokens, and add up their log-probabilities."""
    result = next(results)
    scored = result.prompt_logprobs and result.prompt_logprobs[-continuation:]
    if scored is None:
        drawn = [result, *itertools.islice(results, continuation - 1)]
        scored = [one.token_logprobs[0] for one in drawn if one.token_logprobs]
    entries = [entry for entry in scored if entry is not None]
    return math.fsum(entry.logprob for entry in entries), all(entry.greedy for entry in entries)


def cut_after(rendered: str, last: str) -> str:
    """Cut a rendered chat after `last`, the text of its last message, so that the answer continues this text.

    Raises PromptError if the rendered chat does not contain the text.
    """
    last = last if last.strip() and last in rendered else last.strip()
    place = rendered.rfind(last) if last else -1
    if place < 0:
        raise PromptError(
            f"the rendered chat does not contain the beginning of the answer, {last!r:.60}; evaluate without "
            "--apply_chat_template, or with another template."
        )
    return rendered[: place + len(last)]


_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # in the harness's order
_WHETHER_GREEDY = ("do_sample", "temperature")


def request_parameters(
    gen_kwargs: Mapping[str, Any], given: Mapping[str, Any], max_gen_toks: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The parameters of `TopWModel.generate` for a request, without its seed.

    gen_kwargs: those of the task and of `--gen_kwargs`. As in the harness, a request is greedy with do_sample=False,
        and without a temperature above 0 or do_sample=True.
    given: the parameters in `--model_args`. They override `gen_kwargs`; a temperature also overrides do_sample.
    max_gen_toks: maximum number of new tokens if `gen_kwargs` has no length.

    Raises ParameterError if `until` has another type than text or list of texts, or if `gen_kwargs` has a seed.
    """
    stated = {name: value for name, value in gen_kwargs.items() if value is not None}
    until = stated.pop("until", [])
    until = [text for text in until if text != ""] if isinstance(until, (list, tuple)) else until
    lengths = [stated.pop(name) for name in _LENGTHS if name in stated]
    if "seed" in stated:
        raise ParameterError("gen_kwargs has a seed, but the seed is the run's; give --model_args seed=N.", "seed")
    greedy = {name: stated.pop(name) for name in _WHETHER_GREEDY if name in stated}
    if not given.keys() & _WHETHER_GREEDY:
        draws = greedy.get("do_sample") is not False and (greedy.get("do_sample") or greedy.get("temperature"))
        stated |= greedy if draws else {"temperature": 0.0}
    if until:
        stated["stop_strings"] = PARAMETERS["stop_strings"].read("until", until)
        # Special tokens give no text, so they are stop ids too.
        ids = [token for token, text in tokenizer.special_ids.items() if text in stated["stop_strings"]]
        stated |= {"stop_token_ids": ids} if ids else {}
    named = {ALIASES.get(name, name): (name, value) for name, value in stated.items()}
    return {
        "max_new_tokens": int(lengths[0]) if lengths else max_gen_toks,
        **{
            name: value
            for ours, (name, value) in named.items()
            if ours not in given and (ours in PARAMETERS or not has_no_effect(name, value))
        },
        **given,
    }


class Seeds:
    """Seeds of requests. Each depends on the run's seed, the prompt, and the number of earlier requests with it.

    So the draws of a request do not depend on `--limit`, the order, the number of rows, the rule or other tasks.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._requests: Counter[str] = Counter()  # prompt -> number of its requests

    def next(self, prompt: str) -> int:
        """The seed, below 2**53, of the next request with this prompt."""
        count = self._requests[prompt]
        self._requests[prompt] += 1
        digest = hashlib.sha256(f"{count}\n{prompt}".encode("utf-8", "surrogatepass")).digest()
        return prompt_seed(self._seed, int.from_bytes(digest[:8], "little"))


# Parameters that undo what a model's generation config may ban, because the scored token must be drawn.
_UNEDITED: dict[str, Any] = {
    "temperature": 0.0,
    "min_new_tokens": 0,
    "min_length": 0,
    "suppress_tokens": [],
    "bad_words_ids": [],
    "no_repeat_ngram_size": 0,
    "seed": 0,
}

ROWS = 8  # the default of Engine
_DEFAULT_DEVICE = "cuda:0"  # the harness passes it if --device is not given

OPENING_ARGUMENTS = (
    "provider", "intra_op_num_threads", "inter_op_num_threads", "allow_fallback", "sampler", "max_length",
)  # fmt: skip
"""Arguments passed to `TopWModel.from_pretrained`."""

ENGINE_ARGUMENTS = ("kv_bytes", "prefill_budget", "reuse_prefixes", "prefix_bytes", "exact")
"""Arguments passed to `Engine`."""

OWN_ARGUMENTS = (
    "path", "batch_size", "max_batch_size", "device", "max_gen_toks", "seed", "chat_template_args", "enable_thinking",
    "think_end_token",
)  # fmt: skip

_CHANGES_RESULTS = "it changes what a request returns"
_REFUSED = {
    "pretrained": "give path",
    "model": "give path",
    "max_new_tokens": "give max_gen_toks, or --gen_kwargs max_gen_toks=N to override the tasks",
    **dict.fromkeys(("num_return_sequences", "logprobs", "prompt_logprobs", "streamer"), _CHANGES_RESULTS),
    **dict.fromkeys(("stopping_criteria", "generation_config"), _CHANGES_RESULTS),
}
"""Name that a user may try -> what to do instead, or why it is refused."""


class Arguments:
    """Checked arguments.

    path: the exported folder.
    opening: keyword arguments of `TopWModel.from_pretrained`, which checks their values.
    engine: keyword arguments of `Engine`, which checks their values.
    rows: number of sequences that run at once.
    max_gen_toks: maximum number of new tokens for tasks that do not state it.
    seed: seed of the run; None if it is not given.
    template: variables of the chat template.
    think_end_token: text that ends a model's reasoning; None for models without.
    parameters: parameters of every generation, by the names of `TopWModel.generate`. They override those of tasks.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Check `--model_args`. Raises ParameterError for a missing path, an unknown name, or an invalid value."""
        stated = {name: value for name, value in given.items() if value is not None}
        own, self.opening, self.engine = (
            {name: stated.pop(name) for name in names if name in stated}
            for names in (OWN_ARGUMENTS, OPENING_ARGUMENTS, ENGINE_ARGUMENTS)
        )
        for name in stated:
            ours = ALIASES.get(name, name)
            if name in _REFUSED or ours in _REFUSED:
                reason = _REFUSED.get(name) or _REFUSED[ours]
                raise ParameterError(f"{name} is not an argument of this model: {reason}.", name)
            if ours not in PARAMETERS:
                known = {*OWN_ARGUMENTS, *OPENING_ARGUMENTS, *ENGINE_ARGUMENTS, *PARAMETERS}
                raise unknown_parameter_error(name, known)
        if not isinstance(own.get("path"), (str, os.PathLike)) or not str(own["path"]):
            raise ParameterError("path is missing; give --model_args path=OUT with an exported folder.", "path")
        device = own.get("device", _DEFAULT_DEVICE)
        if device not in ("cpu", _DEFAULT_DEVICE):
            advice = "give --model_args provider=cuda or tensorrt for a GPU"
            raise ParameterError(f"device is {device!r:.60}, but must be cpu; {advice}.", "device")
        if device == "cpu":
            self.opening.setdefault("provider", "cpu")
        self.think_end_token = own.get("think_end_token")
        if self.think_end_token is not None and (not isinstance(self.think_end_token, str) or not self.think_end_token):
            raise ParameterError(
                f"think_end_token is {self.think_end_token!r:.60}, but must be a non-empty text.", "think_end_token"
            )
        self.path = str(own["path"])
        size = own.get("batch_size", "auto")
        rows = ROWS if str(size).partition(":")[0] == "auto" else _read_integer("batch_size", size)
        self.rows = min(rows, _read_integer("max_batch_size", own.get("max_batch_size", rows)))
        self.max_gen_toks = _read_integer("max_gen_toks", own.get("max_gen_toks", 256))
        self.seed = _read_integer("seed", own["seed"], 0, 2**SEED_BITS) if "seed" in own else None
        self.template = _template_variables(own)
        self.parameters = read_values(stated)


def _read_integer(name: str, value: Any, low: int = 1, high: float = math.inf) -> int:
    number: int = integer(low, high)(name, int(value) if isinstance(value, str) and value.isdecimal() else value)
    return number


def _template_variables(own: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the chat template: `chat_template_args`, a mapping or its JSON text, and `enable_thinking`."""
    value = own.get("chat_template_args", {})
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ParameterError(
            f"chat_template_args is {own['chat_template_args']!r:.60}, but must be a JSON object, such as "
            '{"enable_thinking": false}.',
            "chat_template_args",
        )
    thinking = own.get("enable_thinking")
    return dict(value) if thinking is None else {**value, "enable_thinking": thinking}


if NAME not in model_registry:
    model_registry.register(NAME, target="topw_lab.harness:TopWHarness")

_COMMANDS = ("run", "ls", "validate")
_NAMING_A_MODEL = ("--model", "-M", "--config", "-C")  # a configuration may name the model


def run(words: Sequence[str]) -> None:
    """Run `lm_eval WORDS`. The model is `topw_deploy` unless the words name another one.

    Raises the model's errors, ParameterError for an unknown task, and SystemExit for other wrong usage.
    """
    from lm_eval.__main__ import cli_evaluate

    command, *options = words if words and words[0] in _COMMANDS else ["run", *words]
    if command == "run" and options and not any(word.split("=")[0] in _NAMING_A_MODEL for word in options):
        options = ["--model", NAME, *options]
    given = sys.argv
    sys.argv = ["lm_eval", command, *options]
    try:
        cli_evaluate()
    except (ValueError, OSError) as error:
        place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if isinstance(error, TopWError) or place.parent.name != "config":  # the harness's own checks are there
            raise
        raise ParameterError(
            f"{one_line(error)}; see `topw lm-eval ls tasks` and `topw lm-eval run --help`.", "arguments"
        ) from None
    finally:
        sys.argv = given
