"""`prepare`: the only place where prompts and parameters become sequences.

Precedence of parameters: the request, its preset (Top-W only), its `generation_config`, the model's
`generation_config.json`, the export's defaults (Top-W only), this package's defaults.

Prompts are texts, token ids, arrays, tensors and tokenizer outputs. The method `tolist` reads tensors, so that their
library is not imported.
"""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.manifest import DecoderManifest, Manifest, ModelFolder, SamplerInfo, SettingUse
from topw_deploy.runtime.loop import gives_logits
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS, Parameter, check_names, integer, values_per_prompt
from topw_deploy.runtime.sequence import Callbacks, Sequence, SequenceParams, Streamer
from topw_deploy.runtime.session import Session
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.sampling.parameters import (
    PARAMETER_NAMES,
    TopWParameters,
    is_boolean,
    preset_parameters,
    with_raw_scale,
)
from topw_deploy.sampling.rules import RULE_OF_VALUE, RULE_PARAMETER_NAMES, RULES, RuleParameters
from topw_deploy.sampling.seeds import fresh_seed, sequence_seed
from topw_deploy.text import short_repr

Prompt: TypeAlias = "str | list[int]"

LONGEST_LIST = 3840
"""Tokens that the sampler's function sorts (docs/contract/graph.md, section 8)."""

CONFIG_FILE = "generation_config.json"
_MOST_CHARACTERS = 256  # per token; the longest tokens of published vocabularies are runs of 128 spaces
_PER_PROMPT = {name: parameter for name, parameter in PARAMETERS.items() if parameter.per_prompt}
_PER_CALL = {name: parameter for name, parameter in PARAMETERS.items() if not parameter.per_prompt}
_IN_JSON = {name: parameter for name, parameter in PARAMETERS.items() if "json" in parameter.places}
IN_FILE = {name: parameter for name, parameter in _PER_PROMPT.items() if "file" in parameter.places}
"""The parameters that generation_config.json may state."""
_OF_IDS = ("eos_token_id", "stop_token_ids", "logit_bias", "suppress_tokens", "allowed_token_ids", "bad_words_ids")
_TAKEN_AS_STATED = (
    *("stop_strings", "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
    *("logit_bias", "suppress_tokens", "allowed_token_ids", "bad_words_ids", "logprobs", "prompt_logprobs"),
)
_TOP_W = RuleParameters()
# A tokenizer's outputs without effect on a decoder's tokens.
_IGNORED_INPUTS = frozenset({"token_type_ids", "special_tokens_mask", "offset_mapping", "length"})

# Settings of transformers without effect on the drawn tokens.
_WITHOUT_EFFECT = frozenset({
    "transformers_version", "trust_remote_code", "top_w", "bos_token_id", "decoder_start_token_id",
    "use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "prefill_chunk_size",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size",
    "compile_config", "disable_compile", "low_memory", "early_stopping", "length_penalty", "renormalize_logits",
})  # fmt: skip

# Values that disable a method.
_DISABLING_VALUES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("top_p", "typical_p", "num_return_sequences", "num_beams", "num_beam_groups"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("min_p", "top_h", "epsilon_cutoff", "eta_cutoff", "diversity_penalty"), (0,)),
    **{"encoder_no_repeat_ngram_size": (0,), "top_k": (0, -1)},
}
_PACKAGE_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a model, and of the options with which the model or an engine was opened.

    context_length, max_length: maximum tokens per sequence.
    sequences: maximum sequences per call.
    opened_as: "model" or "engine", the word for messages.
    longest_pool: see `longest_pool`.
    rules: names of the sampling rules that the folder carries.
    """

    context_length: int
    vocab_size: int
    max_length: int | None = None
    sequences: int | None = None
    opened_as: str = "model"
    longest_pool: int | None = None
    rules: tuple[str, ...] = tuple(RULES)

    @property
    def tokens(self) -> int:
        """The maximum number of tokens per sequence."""
        return self.context_length if self.max_length is None else min(self.max_length, self.context_length)


def model_limits(manifest: DecoderManifest, session: Session, max_length: int | None, max_batch: int | None) -> Limits:
    """The limits of a model that is opened with these options. Raises ParameterError for an option out of range."""
    context, sampler = manifest.decoder.context_length, manifest.sampler
    length = check_size("max_length", max_length, context, f"the model's context holds {context}")
    batch = check_size("max_batch", max_batch, session.most_rows, f"the engine was built for {session.most_rows}")
    pool = longest_pool(session.sampler, sampler)
    return Limits(context, sampler.vocab_size, length, batch or session.most_rows, "model", pool, sampler.rules)


def check_size(name: str, value: object, most: int | None = None, limit: str = "") -> int | None:
    """Return the option `name`. Raises ParameterError unless it is None or an integer from 1 to `most`.

    limit: why at most `most`, for the message.
    """
    size: int | None = None if value is None else integer(1)(name, value)
    if size is not None and size > (most or math.inf):
        raise ParameterError(f"{name} is {size}, but {limit}; give at most that.", name)
    return size


def longest_pool(sampler: str, info: SamplerInfo) -> int | None:
    """The largest `top_h_pool` that a session can compute, apart from the whole vocabulary; None for any.

    sampler: the session's "native", "plugin" or "graph".
    """
    searches = sampler == "graph" and info.vocab_size > LONGEST_LIST
    return LONGEST_LIST if searches else None


class Sequences(list[Sequence]):
    """The sequences of a call, by prompt.

    is_single: whether the call has one result, not a list.
    streamer: the call's streamer, or None.
    """

    is_single: bool
    streamer: Streamer | None


class Preparer:
    """Makes sequences from prompts and parameters, for one model. Any thread may use it.

    limits: those of the model; an engine has its own.
    defaults: parameters of the model's `generation_config.json`.
    """

    def __init__(
        self,
        folder: ModelFolder[DecoderManifest],
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        pads: bool = True,
        has_drafts: bool = False,
    ) -> None:
        """pads: whether the prompts of a batch may differ in length.
        has_drafts: whether there is a draft model.

        Raises ParameterError for an invalid parameter in `generation_config.json`.
        """
        self.limits = limits
        self.defaults, self._bos_token_id = read_model_defaults(folder, tokenizer)
        self._path, self._manifest, self._tokenizer, self._pads = folder.path, folder.manifest, tokenizer, pads
        self._has_drafts = has_drafts
        self._geometry, self._median = folder.manifest.sampler.geometry, folder.manifest.median_distance
        package = {name: parameter.default for name, parameter in _PER_PROMPT.items()}
        self._fallbacks = {**package, **folder.manifest.stated_defaults}

    def prepare(
        self,
        prompt: Any,
        parameters: Mapping[str, Any],
        limits: Limits | None = None,
        shown_tokens: Collection[int] = (),
    ) -> Sequences:
        """The sequences of a call. See `TopWModel.prepare`."""
        limits = limits or self.limits
        prompt, mask, given = split_inputs(prompt, parameters)
        named = check_names(given)
        stated = PARAMETERS["generation_config"].read("generation_config", named.pop("generation_config", {}))
        config = read_settings(stated, "generation_config", _IN_JSON)
        call = {
            name: parameter.read(name, named.pop(name)) if name in named else config.pop(name, parameter.default)
            for name, parameter in _PER_CALL.items()
        }
        prompts, is_single = read_prompts(prompt, mask)
        samples, streamer, criteria = call["num_return_sequences"], call["streamer"], call["stopping_criteria"]
        if len(prompts) * samples > (limits.sequences or math.inf):
            what, option = limits.opened_as, "max_queue" if limits.opened_as == "engine" else "max_batch"
            name = "num_return_sequences" if len(prompts) == 1 else None
            raise PromptError(
                f"the request has {len(prompts) * samples} sequences, but the {what} takes {limits.sequences} at a "
                f"time; give {f'a lower {name}' if name else 'fewer'}, or open the {what} with a higher {option}.",
                name or option,
            )
        columns = {name: values_per_prompt(name, value, len(prompts)) for name, value in named.items()}
        ids = []
        for index, content in enumerate(prompts):
            which = f"prompt {index}" if len(prompts) > 1 else "the prompt"
            ids.append(self._token_ids(content, call["add_special_tokens"], which, limits))
        others = self._complete(config), self._complete(self.defaults), self._fallbacks
        hidden = self._tokenizer.special_ids.keys() - set(shown_tokens) if call["skip_special_tokens"] else ()
        sequences = Sequences()
        for index, tokens in enumerate(ids):
            own = {name: column[index] for name, column in columns.items() if column[index] is not None}
            values = ChainMap(self._complete(own), *others)
            params = self._resolve(len(tokens), values, limits, hidden)
            for place in range(samples):
                follows = streamer is not None or criteria
                callbacks = Callbacks(tokens, len(tokens) + params.budget, streamer, criteria) if follows else None
                each = replace(params, seed=sequence_seed(params.seed, place)) if place else params
                sequences.append(Sequence(len(sequences), tokens, each, self._tokenizer, callbacks))
        sequences.is_single, sequences.streamer = is_single and samples == 1, streamer
        self._check_together(sequences)
        return sequences

    def encode(self, text: str, add_special_tokens: bool, which: str, limits: Limits) -> list[int]:
        """See `TopWModel.encode`."""
        if len(text) > _MOST_CHARACTERS * limits.tokens:
            raise PromptError(
                f"{which} has {len(text):,} characters, more than {_MOST_CHARACTERS} per token, "
                f"{_excess(limits.tokens + 1, limits)}",
                "max_length",
            )
        return self._tokenizer.encode(text, add_special_tokens)

    def _token_ids(self, prompt: Prompt, add_special_tokens: bool, which: str, limits: Limits) -> tuple[int, ...]:
        ids = self.encode(prompt, add_special_tokens, which, limits) if isinstance(prompt, str) else prompt
        if not ids:
            if self._bos_token_id is None:
                raise PromptError(f"{which} is empty and the tokenizer has no BOS token to start from; give some text.")
            ids = [self._bos_token_id]  # of a file, so it may be no id of the vocabulary
        if len(ids) > limits.tokens:
            raise PromptError(f"{which} has {len(ids)} tokens, {_excess(len(ids), limits)}", "max_length")
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise PromptError(f"{which} holds the token id {token}, but ids go from 0 to {limits.vocab_size - 1}.")
        return tuple(ids)

    def _complete(self, stated: dict[str, Any]) -> dict[str, Any]:
        """The parameters of one source with those of its preset and the ids of its bad words."""
        if "bad_words" in stated:
            ids = list(stated.get("bad_words_ids", ()))
            for word in stated["bad_words"]:  # at the start of a text, and after a space
                bare = word.lstrip(" ")
                texts = (bare, f" {bare}") if bare else (word,)
                ids += [tuple(self._tokenizer.encode(text, False)) for text in texts]
                if () in ids:
                    raise ParameterError(
                        f"bad_words has {short_repr(word)}, which has no tokens; remove it.", "bad_words"
                    )
            stated = {**stated, "bad_words_ids": tuple(dict.fromkeys(ids))}
        return with_preset(stated, self._geometry, self._median)

    def _resolve(
        self, prompt: int, values: ChainMap[str, Any], limits: Limits, hidden: Collection[int]
    ) -> SequenceParams:
        """The parameters of the first sequence of a prompt of `prompt` tokens.

        values: what the request, its generation_config and the model's file state, and the defaults.
        """
        _check_ids(values, limits.vocab_size)
        seed, pad, constraint = values["seed"], values["pad_token_id"], values["structured_outputs"]
        eos, stop = frozenset(values["eos_token_id"]), frozenset(values["stop_token_ids"])
        return SequenceParams(
            top_w=_resolve_top_w(values),
            rule=_resolve_rule(values, limits),
            seed=fresh_seed() if seed is None else seed,
            budget=_resolve_budget(prompt, values, limits),
            min_new_tokens=max(values["min_new_tokens"], values["min_length"] - prompt),
            eos_token_ids=stop if values["ignore_eos"] else eos | stop,
            pad_token_id=pad if pad is not None and pad < limits.vocab_size else min(eos, default=0),
            constraint=None if constraint is None or constraint.kind == "text" else constraint,
            speculate=_resolve_speculation(values["speculate"], self._has_drafts),
            hidden_tokens=frozenset(hidden),
            **{name: values[name] for name in _TAKEN_AS_STATED},
        )

    def _check_together(self, sequences: Sequences) -> None:
        """Check what the graph and the callbacks ask of all sequences."""
        lengths = dict.fromkeys(len(sequence.prompt) for sequence in sequences)
        if not self._pads and len(lengths) > 1:
            raise PromptError(
                f"this decoder cannot pad, but the prompts of the batch have {', '.join(map(str, lengths))} "
                "tokens; generate from them one by one, or group those of equal length."
            )
        if sequences.streamer is not None and len(sequences) > 1:
            raise ParameterError(
                f"a streamer follows one sequence, but the request has {len(sequences)}; generate them one by one, or "
                "use model.stream, whose pieces name their row."
            )
        scored = next((sequence.params for sequence in sequences if sequence.params.needs_scores), None)
        if scored is not None and not gives_logits(self._manifest):
            name = "prompt_logprobs" if scored.logprobs is None else "logprobs"
            raise ParameterError(
                f"{name} needs the graph's output logits in float32 or float16, which {self._path} lacks; export it "
                f"again with --with-logits, or omit {name}.",
                name,
            )


def with_preset(
    stated: Mapping[str, Any], geometry: tuple[str, int | None], median_distance: float | None, *unknown: str
) -> dict[str, Any]:
    """The parameters of one source with those of its preset, and its geom_scale in the metric's unit.

    geometry: (metric, width of the embeddings or None).
    median_distance, unknown: see `with_raw_scale`.
    """
    preset = preset_parameters(stated["preset"], *geometry) if "preset" in stated else {}
    return {**preset, **with_raw_scale(stated, median_distance, *unknown)}


def _check_ids(values: Mapping[str, Any], vocab_size: int) -> None:
    """Raises ParameterError for token ids, and numbers of tokens, that the vocabulary does not have."""
    for name in _OF_IDS:
        largest = max(chain(*values[name]) if name == "bad_words_ids" else values[name], default=0)
        if largest >= vocab_size:
            raise ParameterError(f"{name} names the token id {largest}, but ids go from 0 to {vocab_size - 1}.", name)
    for name in ("logprobs", "prompt_logprobs"):
        if (values[name] or 0) > vocab_size:
            raise ParameterError(f"{name} is {values[name]}, but the vocabulary has {vocab_size} tokens.", name)


def _resolve_top_w(values: ChainMap[str, Any]) -> TopWParameters:
    *stated, model, _ = values.maps
    top_w = {name: values[name] for name in PARAMETER_NAMES}
    for source in (*stated, model):  # first with do_sample or temperature
        sampled = source.get("do_sample")
        if sampled is False:
            top_w["temperature"] = 0.0
        elif sampled and source is not model and TopWParameters(**top_w).greedy:
            if "temperature" in source:
                raise ParameterError(
                    f"do_sample is True, but temperature is {source['temperature']!r}, which is greedy; give a higher "
                    "temperature.",
                    "temperature",
                )
            top_w["temperature"] = 1.0
        if sampled is not None or "temperature" in source:
            break
    return TopWParameters(**top_w)


def _resolve_rule(values: ChainMap[str, Any], limits: Limits) -> RuleParameters:
    """The sampling rule of the first source that names or implies one, else Top-W."""
    for source in values.maps[:-1]:
        own = {name: source[name] for name in RULE_PARAMETER_NAMES if name in source}
        if own:
            named = RULES[own["rule"]].values if own.get("rule") in RULES else ()
            rule = RuleParameters(**{**{value.name: values[value.name] for value in named}, **own})
            check_rule(rule, limits.rules, limits.longest_pool, limits.vocab_size)
            return rule
    return _TOP_W


def check_rule(rule: RuleParameters, carried: Iterable[str], longest: int | None, vocab_size: int) -> None:
    """Raises ParameterError unless a folder can compute `rule`.

    carried: the rules of the folder.
    longest: see `longest_pool`.
    """
    carried = tuple(carried)
    if rule.name not in carried:
        raise ParameterError(
            f"rule is {rule.name}, but this folder carries only {', '.join(carried)}; export it again with "
            f"--rules {','.join((*carried, rule.name))}.",
            "rule",
        )
    share, pool = rule.values
    if longest is not None and rule.name == "top_h" and share < 1 and longest < pool < vocab_size:
        raise ParameterError(
            f"top_h_pool is {pool:.0f}, but the sampler's function takes at most {longest}, or the whole vocabulary of "
            f"{vocab_size}; give such a pool, or open the model with the native sampler.",
            "top_h_pool",
        )


def _resolve_budget(prompt: int, values: ChainMap[str, Any], limits: Limits) -> int:
    """The maximum number of new tokens after a prompt of `prompt` tokens."""
    request, _, model, _ = values.maps
    if "max_new_tokens" in request and "max_length" in request:
        raise ParameterError("max_new_tokens and max_length are both given; give one of them.", "max_new_tokens")
    for source in values.maps:  # the last one states max_new_tokens
        longest = source.get("max_length")
        if "max_new_tokens" in source or (longest or 0) > prompt:
            break
        if longest is not None and source is not model:
            raise PromptError(f"the prompt has {prompt} tokens, but max_length is {longest}; raise it.")
    budget: int = source["max_new_tokens"] if "max_new_tokens" in source else source["max_length"] - prompt
    if budget == 0 and values["prompt_logprobs"] is None:
        raise ParameterError(
            "max_new_tokens is 0, but must be an integer >= 1, or 0 with prompt_logprobs.", "max_new_tokens"
        )
    return min(budget, limits.tokens - prompt)


def _resolve_speculation(stated: str | None, has_drafts: bool) -> str | None:
    if stated == "model" and not has_drafts:
        raise ParameterError(
            "speculate is 'model', but no draft model is open; open the model with draft_model, or give 'prompt'.",
            "speculate",
            "draft_model",
        )
    if stated is None:
        return "model" if has_drafts else None
    return None if stated == "off" else stated


def _excess(tokens: int, limits: Limits) -> str:
    if tokens > limits.context_length:
        return f"the model's context holds {limits.context_length}; shorten it."
    what = limits.opened_as
    return f"but the {what} was opened with max_length {limits.tokens}; shorten it, or open the {what} with more."


def split_inputs(prompt: Any, given: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Returns (prompt, attention mask or None, other parameters) of a call.

    The prompt may be a tokenizer's output, also as keywords: `generate(**tokenizer(text))`. Raises PromptError for no
    prompt, two prompts, and an output that a decoder does not read.
    """
    inputs = {name: given[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in given}
    parameters = {name: value for name, value in given.items() if name not in inputs}
    if isinstance(prompt, Mapping):
        inputs |= prompt
    elif prompt is not None:
        if inputs.get("input_ids") is not None:
            raise PromptError("a prompt and input_ids are both given; give one of them.")
        inputs["input_ids"] = prompt
    prompt, mask = inputs.pop("input_ids", None), inputs.pop("attention_mask", None)
    if prompt is None:
        raise PromptError("there is no prompt; give a text, token ids, a list of either, or input_ids.")
    if unknown := sorted(map(str, inputs.keys() - _IGNORED_INPUTS)):
        raise PromptError(f"a decoder cannot read {', '.join(unknown)}; give input_ids and attention_mask alone.")
    return prompt, mask, parameters


def read_prompts(prompt: Any, mask: Any = None) -> tuple[list[Prompt], bool]:
    """Returns (each prompt as text or ids, whether `prompt` is a single one).

    mask: 0 for tokens on either side to be removed.

    Raises PromptError for other types, or a mask that does not fit or has a hole.
    """
    prompt, mask = _to_lists(prompt), _to_lists(mask)
    if isinstance(prompt, str) or (isinstance(prompt, (list, tuple)) and all(map(_is_scalar, prompt))):
        return [_read_prompt(prompt, mask, "the prompt")], True
    if not isinstance(prompt, (list, tuple)):
        raise PromptError(
            f"the prompt is a {type(prompt).__name__}, but must be a text, token ids, or a list of either."
        )
    masks = [None] * len(prompt) if mask is None else mask
    if not isinstance(masks, (list, tuple)) or len(masks) != len(prompt):
        raise PromptError(f"attention_mask does not fit the {len(prompt)} prompts; give one row of it for each.")
    pairs = enumerate(zip(prompt, masks, strict=True))
    return [_read_prompt(_to_lists(each), _to_lists(row), f"prompt {index}") for index, (each, row) in pairs], False


def _to_lists(value: Any) -> Any:
    """Convert arrays and tensors to nested lists."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic)) or getattr(value, "ndim", None) == 0


def _read_prompt(prompt: Any, mask: Any, which: str) -> Prompt:
    if isinstance(prompt, str):
        if mask is not None:
            raise PromptError(f"{which} is a text, but attention_mask is for token ids; omit it.")
        return prompt
    if not isinstance(prompt, (list, tuple)) or not all(map(_is_scalar, prompt)):
        raise PromptError(f"{short_repr(prompt)} is neither a text nor a list of token ids.")
    ids = list(prompt)
    for position, value in enumerate(ids if not set(map(type, ids)) <= {int} else ()):
        try:
            ids[position] = operator.index(None if is_boolean(value) else value)  # type: ignore[arg-type]
        except TypeError:
            raise PromptError(
                f"{which} holds {short_repr(value)} at position {position}, but token ids are integers; give only ids."
            ) from None
    if mask is None:
        return ids
    fits = isinstance(mask, (list, tuple)) and len(mask) == len(ids)
    if not fits or not all(_is_scalar(flag) and flag in (0, 1) for flag in mask):
        raise PromptError(
            f"attention_mask is {short_repr(mask)} for {which}, but must be 0 or 1 for each of its {len(ids)} tokens."
        )
    kept = [position for position, flag in enumerate(mask) if flag] or [0, -1]
    if kept[-1] - kept[0] + 1 not in (len(kept), 0):
        raise PromptError(
            f"attention_mask masks tokens in the middle of {which}, but may mask only padding before the first token "
            "or after the last one."
        )
    return ids[kept[0] : kept[-1] + 1]


def read_settings(stated: Mapping[str, Any], where: str, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """Read the `known` settings of a generation config under our names. Warns of others that would affect tokens.

    The parameters of sampling rules are used if `rule` names their rule; in a request also without `rule`, if they all
    belong to one rule.

    stated: the settings.
    where: the file or the parameter that has them, for messages.

    Raises ParameterError for an invalid or duplicate parameter.
    """
    uses = uses_of_settings(stated, known, implied=where != CONFIG_FILE)
    if ignored := ignored_settings(stated, uses, where):
        warnings.warn(f"{ignored}.", stacklevel=_caller_stack_level())
    try:
        used = {key: stated[key] for key, use in uses.items() if use == "applied"}
        return {name: known[name].read(name, value) for name, value in check_names(used, known).items()}
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None


def uses_of_settings(
    stated: Mapping[str, Any], known: Mapping[str, Parameter], *, implied: bool = False
) -> dict[str, SettingUse]:
    """Return how the runtime uses each setting of a generation config.

    implied: whether parameters of a single rule choose that rule, see `_effective_rule_parameters`.
    """
    of_rule = _effective_rule_parameters(stated, implied=implied)

    def use_of(key: str, value: Any) -> SettingUse:
        if ALIASES.get(key, key) in known and (key in of_rule or key not in RULE_PARAMETER_NAMES):
            return "applied"
        return "without effect" if value is None or has_no_effect(key, value) else "ignored"

    return {key: use_of(key, value) for key, value in stated.items()}


def ignored_settings(stated: Mapping[str, Any], uses: Mapping[str, SettingUse], where: str) -> str:
    """Return a sentence, without its full stop, that lists the ignored settings of `where`; "" if none is ignored."""
    ignored = [f"{key}={short_repr(stated[key])}" for key in sorted(stated) if uses[key] == "ignored"]
    of_rule = any(uses[key] == "ignored" and ALIASES.get(key, key) in RULE_PARAMETER_NAMES for key in stated)
    hint = ": name a `rule` to use its parameters" if of_rule else ""
    return f"{where} sets {', '.join(ignored)}, which has no effect here{hint}" if ignored else ""


def _effective_rule_parameters(stated: Mapping[str, Any], *, implied: bool) -> frozenset[str]:
    """The names of the rule parameters that take effect in a generation config: those of the rule that it names.

    implied: whether parameters of a single rule choose that rule without naming it. False for the model's own file,
        whose rule is Top-W unless the file names another.
    """
    rule = stated.get("rule")
    if rule is None and implied:
        own = ((name, stated[name]) for name in RULE_OF_VALUE if stated.get(name) is not None)
        found = {RULE_OF_VALUE[name].name for name, value in own if not _disables(name, value)}
        rule = found.pop() if len(found) == 1 else None
    if rule is None:
        return frozenset()
    values = RULES[rule].values if isinstance(rule, str) and rule in RULES else ()
    return frozenset({"rule", *(value.name for value in values)})


def has_no_effect(name: str, value: Any) -> bool:
    """Whether a setting that is not supported has no effect on tokens anyway, such as num_beams=1."""
    return name in _WITHOUT_EFFECT or name.startswith("_") or value is False or _disables(name, value)


def _disables(key: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and value in _DISABLING_VALUES.get(key, ())


def _caller_stack_level() -> int:
    """The stack level of the caller outside this package, for `warnings.warn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
        level, frame = level + 1, frame.f_back
    return level


def read_model_defaults(folder: ModelFolder[Manifest], tokenizer: Tokenizer) -> tuple[dict[str, Any], int | None]:
    """Read the parameters of the model's `generation_config.json`, without token ids outside the vocabulary.

    If the file has no EOS or BOS ids, those of `config.json` are read. Without any, no token ends a text, as in
    transformers, and the BOS id is the tokenizer's. Warns of settings without effect.

    Returns (parameters, BOS id).

    Raises ParameterError, naming the file, for an invalid parameter.
    """
    generation, config = folder.read_json(CONFIG_FILE), folder.read_json("config.json")
    text = config.get("text_config")
    configs = [generation, config, *([text] if isinstance(text, dict) else [])]
    stated = (*(each.get("eos_token_id") for each in configs), ())
    eos = next(value for value in stated if value is not None)
    begins = (each.get("bos_token_id") for each in configs)
    bos = next((value for value in begins if type(value) is int), tokenizer.bos_token_id)
    defaults = read_settings({**generation, "eos_token_id": eos}, CONFIG_FILE, IN_FILE)
    size = folder.manifest.sampler.vocab_size
    for name in ("eos_token_id", "stop_token_ids", "suppress_tokens"):
        defaults[name] = tuple(token for token in defaults.get(name, ()) if token < size)
    defaults["bad_words_ids"] = tuple(word for word in defaults.get("bad_words_ids", ()) if max(word) < size)
    return defaults, bos
