"""`prepare`: the only place where prompts and parameters become sequences.

Precedence of parameters: the request, its preset (Top-W only), its `generation_config`, the model's
`generation_config.json`, the export's defaults (Top-W only), this package's defaults.

Prompts are texts, token ids, arrays, tensors and tokenizer outputs. The method `tolist` reads tensors, so that their
library is not imported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Encoding

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.manifest import DecoderManifest, ModelFolder, SamplerInfo
from topw_deploy.runtime.generation_config import read_bos_token_id, read_model_defaults, read_settings
from topw_deploy.runtime.loop import logits_output
from topw_deploy.runtime.parameters import PARAMETERS, check_names, is_boolean, values_per_prompt
from topw_deploy.runtime.sequence import Callbacks, Sequence, SequenceParams, Streamer
from topw_deploy.runtime.session import Session
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.sampling.parameters import PARAMETER_NAMES, TopWParameters
from topw_deploy.sampling.presets import preset_parameters, with_raw_scale
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES, RULES, RuleParameters
from topw_deploy.sampling.seeds import fresh_seed
from topw_deploy.text import short_repr

Prompt: TypeAlias = "str | list[int]"
LengthCheck: TypeAlias = "Callable[[int, str], None]"

_BAD_WORDS, _BAD_WORDS_IDS = "bad_words", "bad_words_ids"
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_IGNORED_INPUTS = frozenset({"special_tokens_mask", "offset_mapping", "length"})  # no effect on tokens


LONGEST_LIST = 3840
"""Tokens that the sampler's function sorts (docs/contract/graph.md, section 8)."""

_MOST_CHARACTERS = 256  # per token; the longest tokens of published vocabularies are runs of 128 spaces
_SHARED = tuple(name for name, parameter in PARAMETERS.items() if not parameter.per_prompt)
_TOP_W = RuleParameters()


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
    context, built_for = manifest.decoder.context_length, session.most_rows
    check_size("max_length", max_length)
    check_size("max_batch", max_batch)
    if max_length is not None and max_length > context:
        raise ParameterError(
            f"max_length is {max_length}, but the model's context holds {context}; give at most that.", "max_length"
        )
    if built_for is not None and (max_batch or 1) > built_for:
        raise ParameterError(
            f"max_batch is {max_batch}, but the engine was built for {built_for}; give at most that, or build it again "
            "with a higher --max-batch.",
            "max_batch",
        )
    sampler = manifest.sampler
    pool = longest_pool(session.sampler, sampler)
    return Limits(
        context, sampler.vocab_size, max_length, max_batch or built_for, longest_pool=pool, rules=sampler.rules
    )


def check_size(name: str, value: object) -> None:
    """Raises ParameterError unless `value` is None or an integer >= 1. name: the option's name."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ParameterError(f"{name} is {value!r}, but must be an integer >= 1.", name)


def longest_pool(sampler: str, info: SamplerInfo) -> int | None:
    """The largest `top_h_pool` that a session can compute, apart from the whole vocabulary; None for any.

    sampler: the session's "native", "plugin" or "graph".
    """
    searches = sampler == "graph" and info.vocab_size > LONGEST_LIST
    return LONGEST_LIST if searches else None


class Sequences(list[Sequence]):
    """The sequences of a call, by prompt, then sample.

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
        self, folder: ModelFolder[DecoderManifest], tokenizer: Tokenizer, limits: Limits, *, pads: bool = True
    ) -> None:
        """pads: whether the prompts of a batch may differ in length.

        Raises ParameterError for an invalid parameter in `generation_config.json`.
        """
        manifest = folder.manifest
        self.limits, self.defaults = limits, read_model_defaults(folder, tokenizer)
        self._path, self._tokenizer, self._pads = folder.path, tokenizer, pads
        self._bos_token_id = read_bos_token_id(folder, tokenizer)
        self._exported, self._geometry = manifest.stated_defaults, manifest.sampler.geometry
        self._median_distance, self._logits = manifest.median_distance, logits_output(manifest)

    def prepare(self, prompt: Any, parameters: Mapping[str, Any], limits: Limits | None = None) -> Sequences:
        """The sequences of a call. See `TopWModel.prepare`."""
        limits = limits or self.limits
        prompt, mask, given = split_inputs(prompt, parameters)
        own, config, shared = self._split(check_names(given))
        prompts, is_single = read_prompts(prompt, mask, lambda tokens, which: check_length(tokens, limits, which))
        samples = shared["num_return_sequences"]
        check_sequence_count(len(prompts) * samples, limits)
        names = [f"prompt {index}" for index in range(len(prompts))] if len(prompts) > 1 else ["the prompt"]
        ids = [
            tuple(self._token_ids(each, name, shared["add_special_tokens"], limits))
            for each, name in zip(prompts, names, strict=True)
        ]
        sources = self._sources(own, config, len(prompts))
        sequences = Sequences()
        for tokens, name, each in zip(ids, names, sources, strict=True):
            check_prompt(tokens, limits, name)
            seed = each.get("seed")
            seed = fresh_seed() if seed is None else seed
            for sample in range(samples):
                params = self._resolve(len(tokens), each, limits, seed, sample, shared["skip_special_tokens"])
                sequences.append(self._new_sequence(len(sequences), tokens, params, shared))
        sequences.is_single, sequences.streamer = is_single and samples == 1, shared["streamer"]
        self._check_together(sequences, [len(tokens) for tokens in ids])
        return sequences

    def encode(self, text: str, add_special_tokens: bool, which: str, limits: Limits) -> list[int]:
        """See `TopWModel.encode`."""
        if len(text) > _MOST_CHARACTERS * limits.tokens:
            raise PromptError(
                f"{which} has {len(text):,} characters, more than {_MOST_CHARACTERS} per token, "
                f"{_excess_clause(limits.tokens + 1, limits)}",
                "max_length",
            )
        return self._tokenizer.encode(text, add_special_tokens)

    def _split(self, named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Returns (the values per prompt, those of the generation_config, the shared values of the call)."""
        config: dict[str, Any] = {}
        if "generation_config" in named:
            stated = PARAMETERS["generation_config"].read("generation_config", named.pop("generation_config"))
            known = {name: parameter for name, parameter in PARAMETERS.items() if "json" in parameter.places}
            config = read_settings(stated, "generation_config", known)
        shared = {
            name: PARAMETERS[name].read(name, named.pop(name))
            if name in named
            else config.pop(name, PARAMETERS[name].default)
            for name in _SHARED
        }
        return encode_bad_words(named, self._tokenizer), encode_bad_words(config, self._tokenizer), shared

    def _token_ids(self, prompt: str | list[int], which: str, add_special_tokens: bool, limits: Limits) -> list[int]:
        ids = self.encode(prompt, add_special_tokens, which, limits) if isinstance(prompt, str) else prompt
        return ids or ([] if self._bos_token_id is None else [self._bos_token_id])

    def _sources(self, own: Mapping[str, Any], config: Mapping[str, Any], prompts: int) -> list[_Sources]:
        """The sources of each prompt's parameters."""
        columns = {name: values_per_prompt(name, value, prompts) for name, value in own.items()}
        own_of = [{n: c[index] for n, c in columns.items() if c[index] is not None} for index in range(prompts)]
        about = self._geometry, self._median_distance
        others = with_preset(config, *about), with_preset(self.defaults, *about)
        return [_Sources(with_preset(each, *about), *others) for each in own_of]

    def _resolve(
        self, prompt: int, sources: _Sources, limits: Limits, seed: int, sample: int, skip_special_tokens: bool
    ) -> SequenceParams:
        """The parameters of a sequence with a prompt of `prompt` tokens."""
        value = sources.value
        eos, stop = frozenset(value("eos_token_id")), frozenset(value("stop_token_ids"))
        for name in ("eos_token_id", "stop_token_ids", "logit_bias", "suppress_tokens", "allowed_token_ids"):
            sources.check_ids(name, value(name), limits)
        for word in value("bad_words_ids"):
            sources.check_ids("bad_words_ids", word, limits)
        for name in ("logprobs", "prompt_logprobs"):
            sources.check_count(name, limits)
        pad, constraint = value("pad_token_id"), value("structured_outputs")
        return SequenceParams(
            top_w=_resolve_top_w(sources, self._exported),
            rule=_resolve_rule(sources, limits),
            seed=seed,
            sample=sample,
            budget=_resolve_budget(prompt, sources, limits),
            min_new_tokens=max(value("min_new_tokens"), value("min_length") - prompt),
            eos_token_ids=stop if value("ignore_eos") else eos | stop,
            pad_token_id=pad if pad is not None and pad < limits.vocab_size else min(eos, default=0),
            stop_strings=value("stop_strings"),
            repetition_penalty=value("repetition_penalty"),
            presence_penalty=value("presence_penalty"),
            frequency_penalty=value("frequency_penalty"),
            logit_bias=value("logit_bias"),
            suppress_tokens=value("suppress_tokens"),
            allowed_token_ids=value("allowed_token_ids"),
            bad_words_ids=value("bad_words_ids"),
            no_repeat_ngram_size=value("no_repeat_ngram_size"),
            constraint=None if constraint is None or constraint.kind == "text" else constraint,
            logprobs=value("logprobs"),
            prompt_logprobs=value("prompt_logprobs"),
            skip_special_tokens=skip_special_tokens,
        )

    def _new_sequence(
        self, index: int, prompt: tuple[int, ...], params: SequenceParams, shared: Mapping[str, Any]
    ) -> Sequence:
        callbacks = None
        if shared["streamer"] is not None or shared["stopping_criteria"]:
            callbacks = Callbacks(prompt, len(prompt) + params.budget, shared["streamer"], shared["stopping_criteria"])
        return Sequence(index, prompt, params, self._tokenizer, callbacks)

    def _check_together(self, sequences: Sequences, lengths: list[int]) -> None:
        """Check what the graph and the callbacks ask of all sequences. lengths: of the prompts."""
        if not self._pads and len(set(lengths)) > 1:
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
        if scored is not None:
            self._check_logits("prompt_logprobs" if scored.logprobs is None else "logprobs")

    def _check_logits(self, name: str) -> None:
        """Raises ParameterError if the graph gives no log-probabilities, which the parameter `name` asks for."""
        if self._logits is None:
            raise ParameterError(
                f"{name} needs the graph's output logits, which {self._path} lacks; export it again with "
                f"--with-logits, or omit {name}.",
                name,
            )
        if not ELEMENT_TYPES[self._logits.dtype].numpy:
            raise ParameterError(
                f"{name} needs logits of float32 or float16, but those of {self._path} are {self._logits.dtype}; "
                f"export the model with another type, or omit {name}.",
                name,
            )


def with_preset(
    stated: Mapping[str, Any], geometry: tuple[str, int | None], median_distance: float | None, *unknown: str
) -> Mapping[str, Any]:
    """The parameters of one source with those of its preset, and its geom_scale in the metric's unit.

    geometry: (metric, width of the embeddings or None).
    median_distance, unknown: see `with_raw_scale`.
    """
    if "geom_unit" in stated:
        stated = with_raw_scale(stated, median_distance, *unknown)
    return {**preset_parameters(stated["preset"], *geometry), **stated} if "preset" in stated else stated


class _Sources:
    """Where a prompt's parameters are stated: its request, the request's generation_config, and the model's own.

    all: the three, the first to win before the others.
    """

    def __init__(self, request: Mapping[str, Any], config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        self.all = (request, config, model)
        self.request, self.config, self.model = self.all

    def get(self, name: str, default: Any = None) -> Any:
        """The value of the first source that states `name`, else `default`."""
        return next((source[name] for source in self.all if name in source), default)

    def value(self, name: str) -> Any:
        """The value of the first source that states `name`, else this package's default."""
        return self.get(name, PARAMETERS[name].default)

    def name_in(self, source: Mapping[str, Any], name: str) -> str:
        """The name of a parameter for messages, with the source where it matters."""
        return f"generation_config: {name}" if source is self.config else name

    def stated_name(self, name: str) -> str:
        """The name of a parameter for messages about its value."""
        return self.name_in(next((source for source in self.all if name in source), self.model), name)

    def check_ids(self, name: str, ids: Iterable[int], limits: Limits) -> None:
        """Raises ParameterError for an id of the parameter `name` that the vocabulary does not have."""
        for token in ids:
            if token >= limits.vocab_size:
                raise ParameterError(
                    f"{self.stated_name(name)} names the token id {token}, but ids go from 0 to "
                    f"{limits.vocab_size - 1}.",
                    name,
                )

    def check_count(self, name: str, limits: Limits) -> None:
        """Raises ParameterError if the parameter `name` asks for more tokens than the vocabulary has."""
        count = self.value(name)
        if count is not None and count > limits.vocab_size:
            raise ParameterError(
                f"{self.stated_name(name)} is {count}, but the vocabulary has {limits.vocab_size} tokens; give at "
                "most that.",
                name,
            )


def _resolve_top_w(sources: _Sources, exported: Mapping[str, Any]) -> TopWParameters:
    values = {name: sources.get(name, exported[name]) for name in PARAMETER_NAMES}
    for source in sources.all:  # first with do_sample or temperature
        sampled = source.get("do_sample")
        if sampled is False:
            values["temperature"] = 0.0
        elif sampled and source is not sources.model and TopWParameters(**values).greedy:
            if "temperature" in source:
                raise ParameterError(
                    f"{sources.name_in(source, 'do_sample')} is True, but temperature is {source['temperature']!r}, "
                    "which is greedy; give a higher temperature.",
                    "temperature",
                )
            values["temperature"] = 1.0
        if sampled is not None or "temperature" in source:
            break
    return TopWParameters(**values)


def _resolve_rule(sources: _Sources, limits: Limits) -> RuleParameters:
    """The sampling rule of the first source that names or implies one, else Top-W."""
    for source in sources.all:
        own = {name: source[name] for name in RULE_PARAMETER_NAMES if name in source}
        if own:
            named = RULES[own["rule"]].values if own.get("rule") in RULES else ()
            others = {value.name: sources.get(value.name) for value in named}
            rule = RuleParameters(**{**others, **own})
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


def _resolve_budget(prompt: int, sources: _Sources, limits: Limits) -> int:
    """The maximum number of new tokens after a prompt of `prompt` tokens."""
    if "max_new_tokens" in sources.request and "max_length" in sources.request:
        raise ParameterError("max_new_tokens and max_length are both given; give one of them.")
    wanted = PARAMETERS["max_new_tokens"].default
    for source in sources.all:
        if "max_new_tokens" in source:
            wanted = source["max_new_tokens"]
            break
        if source.get("max_length", 0) > prompt:
            wanted = source["max_length"] - prompt
            break
        if "max_length" in source and source is not sources.model:
            raise PromptError(
                f"the prompt has {prompt} tokens, but {sources.name_in(source, 'max_length')} is "
                f"{source['max_length']}; raise it."
            )
    if wanted == 0 and sources.value("prompt_logprobs") is None:
        raise ParameterError(
            f"{sources.name_in(source, 'max_new_tokens')} is 0, but must be an integer >= 1, or 0 with "
            "prompt_logprobs.",
            "max_new_tokens",
        )
    return min(wanted, limits.tokens - prompt)


def check_length(tokens: int, limits: Limits, which: str) -> None:
    """Raises PromptError for a prompt of too many tokens. which: the prompt's name in the message."""
    if tokens > limits.tokens:
        raise PromptError(f"{which} has {tokens} tokens, {_excess_clause(tokens, limits)}", "max_length")


def _excess_clause(tokens: int, limits: Limits) -> str:
    if tokens > limits.context_length:
        return f"the model's context holds {limits.context_length}; shorten it."
    what = limits.opened_as
    return f"but the {what} was opened with max_length {limits.tokens}; shorten it, or open the {what} with more."


def check_sequence_count(sequences: int, limits: Limits) -> None:
    """Raises PromptError, or ParameterError for an engine, if a request has more sequences than the limits allow."""
    if sequences <= (limits.sequences or sequences):
        return
    if limits.opened_as == "engine":
        raise ParameterError(
            f"the request has {sequences} sequences, but the engine takes {limits.sequences} at a time; give fewer, or "
            "make it with a higher max_queue.",
            "max_queue",
        )
    raise PromptError(
        f"the request has {sequences} sequences, but the model was opened with max_batch {limits.sequences}; "
        "give fewer at a time, or open it (or build its engine) for more.",
        "max_batch",
    )


def check_prompt(prompt: tuple[int, ...], limits: Limits, which: str) -> None:
    """Raises PromptError for token ids that are none, too many or outside the vocabulary. which: the prompt's name."""
    if not prompt:
        raise PromptError(f"{which} is empty and the tokenizer has no BOS token to start from; give some text.")
    check_length(len(prompt), limits, which)
    for token in prompt:
        if not 0 <= token < limits.vocab_size:
            raise PromptError(f"{which} holds the token id {token}, but ids go from 0 to {limits.vocab_size - 1}.")


def split_inputs(prompt: Any, given: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Returns (prompt, attention mask or None, other parameters) of a call.

    The prompt may come as keywords: `generate(**tokenizer(text))`. Raises PromptError for no prompt or two prompts.
    """
    parameters = dict(given)
    inputs = {name: parameters.pop(name) for name in _INPUTS if name in parameters}
    if prompt is not None and inputs.get("input_ids") is not None:
        raise PromptError("a prompt and input_ids are both given; give one of them.")
    if prompt is None:
        prompt = inputs.get("input_ids")
    if prompt is None:
        raise PromptError("there is no prompt; give a text, token ids, a list of either, or input_ids.")
    _check_segments(inputs.get("token_type_ids"))
    return prompt, inputs.get("attention_mask"), parameters


def read_prompts(
    prompt: Any, attention_mask: Any = None, check: LengthCheck = lambda tokens, which: None
) -> tuple[list[Prompt], bool]:
    """Returns (each prompt as text or ids, whether `prompt` is a single one).

    attention_mask: masked tokens, on either side, are removed.
    check: called with the length and the name of each prompt of ids without a mask, before its ids are read.

    Raises PromptError for other types, or a mask that does not fit or has a hole.
    """
    prompt, mask = _unwrap_mapping(prompt, attention_mask)
    batched = getattr(prompt, "ndim", 1) > 1
    if mask is None:
        _check_array_length(prompt, check)
    prompt, mask = to_lists(prompt), to_lists(mask)
    if mask is None and isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], int):
        check(len(prompt), "the prompt")
    if not isinstance(prompt, (str, list, tuple)):
        raise PromptError(
            f"the prompt is a {type(prompt).__name__}, but must be a text, token ids, or a list of either."
        )
    if isinstance(prompt, str) or (not batched and all(_is_scalar(item) for item in prompt)):
        return [_read_prompt(prompt, mask, "the prompt", check)], True
    if not prompt:
        raise PromptError("the batch has no prompts; give at least one.")
    masks = [None] * len(prompt) if mask is None else mask
    if not isinstance(masks, (list, tuple)) or len(masks) != len(prompt):
        raise PromptError(
            f"attention_mask does not fit the {len(prompt)} prompts; give one row of it for each of them."
        )
    rows = enumerate(zip(prompt, masks, strict=True))
    return [_read_prompt(item, mask, f"prompt {i}", check) for i, (item, mask) in rows], False


def _check_array_length(prompt: Any, check: LengthCheck) -> None:
    if isinstance(prompt, np.ndarray) and prompt.dtype.kind in "iu" and prompt.ndim in (1, 2) and prompt.size:
        check(prompt.shape[-1], "the prompt" if prompt.ndim == 1 else "prompt 0")


def to_lists(value: Any) -> Any:
    """Convert arrays and tensors to nested lists."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if hasattr(value, "__array__"):
        return np.asarray(value).tolist()
    return value


def _unwrap_mapping(prompt: Any, mask: Any) -> tuple[Any, Any]:
    if isinstance(prompt, Encoding):
        prompt = {"input_ids": prompt.ids, "attention_mask": prompt.attention_mask}
    if not isinstance(prompt, Mapping):
        return prompt, mask
    if prompt.get("input_ids") is None:
        raise PromptError(f"the prompt is a mapping of {short_repr(sorted(map(str, prompt)))}; it must have input_ids.")
    unknown = sorted(str(name) for name in prompt if name not in _IGNORED_INPUTS and name not in _INPUTS)
    if unknown:
        raise PromptError(
            f"the prompt is a mapping with {', '.join(unknown)}, which a decoder cannot read; give input_ids and "
            "attention_mask alone."
        )
    _check_segments(prompt.get("token_type_ids"))
    inner = prompt.get("attention_mask")
    if inner is not None and mask is not None:
        raise PromptError("attention_mask is given twice, as an argument and in the prompt; give it once.")
    return prompt["input_ids"], mask if inner is None else inner


def _read_prompt(prompt: Any, mask: Any, which: str, check: LengthCheck) -> Prompt:
    if isinstance(prompt, str):
        if mask is not None:
            raise PromptError(f"{which} is a text, but attention_mask is for token ids; omit it.")
        return prompt
    prompt, mask = _unwrap_mapping(prompt, mask)
    prompt, mask = to_lists(prompt), to_lists(mask)
    if mask is None and isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], int):
        check(len(prompt), which)
    if not isinstance(prompt, (list, tuple)) or not all(_is_scalar(item) for item in prompt):
        raise PromptError(f"{short_repr(prompt)} is neither a text nor a list of token ids.")
    ids = _read_ids(prompt, which)
    return ids if mask is None else _remove_masked(ids, mask, which)


def _read_ids(prompt: list[Any] | tuple[Any, ...], which: str) -> list[int]:
    if set(map(type, prompt)) <= {int}:
        return list(prompt)
    ids = []
    for position, value in enumerate(prompt):
        try:
            ids.append(operator.index(value if not is_boolean(value) else None))  # type: ignore[arg-type]
        except TypeError:
            raise PromptError(
                f"{which} holds {short_repr(value)} at position {position}, but token ids are integers; give only ids."
            ) from None
    return ids


def _remove_masked(ids: list[int], mask: Any, which: str) -> list[int]:
    if not isinstance(mask, (list, tuple)) or not all(_is_scalar(m) for m in mask) or len(mask) != len(ids):
        length = len(mask) if isinstance(mask, (list, tuple)) else 1
        raise PromptError(
            f"attention_mask has {length} values for {which}, which has {len(ids)} tokens; give one for each token."
        )
    odd = [m for m in mask if m not in (0, 1)]
    if odd:
        raise PromptError(f"attention_mask has {short_repr(odd[0])} for {which}, but must be 0 or 1.")
    kept = [position for position, m in enumerate(mask) if m]
    if not kept:
        return []
    first, last = kept[0], kept[-1]
    if last - first + 1 != len(kept):
        hole = next(position for position in range(first, last) if not mask[position])
        raise PromptError(
            f"attention_mask masks position {hole} in the middle of {which}, but may mask only padding before the "
            "first token or after the last one."
        )
    return ids[first : last + 1]


def _check_segments(segments: Any) -> None:
    """Raises PromptError unless `segments`, the token_type_ids that some tokenizers add, are all 0."""
    if segments is not None and _has_nonzero(segments):
        raise PromptError("token_type_ids has values other than 0, but a decoder has only one segment; omit it.")


def _has_nonzero(value: Any) -> bool:
    value = to_lists(value)
    return any(map(_has_nonzero, value)) if isinstance(value, (list, tuple)) else bool(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic)) or getattr(value, "ndim", None) == 0


def encode_bad_words(given: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Replace `bad_words` among a request's parameters by `bad_words_ids`.

    Two tokenizations of each word are banned: at the start of a text, and after a space.

    Raises ParameterError for other values than texts, a text without tokens, or both names.
    """
    if _BAD_WORDS not in given:
        return dict(given)
    if _BAD_WORDS_IDS in given:
        raise ParameterError(f"{_BAD_WORDS} and {_BAD_WORDS_IDS} are both given; give one of them.", _BAD_WORDS)
    others = {name: value for name, value in given.items() if name != _BAD_WORDS}
    value, parameter = given[_BAD_WORDS], PARAMETERS[_BAD_WORDS]
    if parameter.lists_values(value):
        rows = [None if v is None else _encode_words(parameter.read(_BAD_WORDS, v), tokenizer) for v in value]
        return {**others, _BAD_WORDS_IDS: rows}
    return {**others, _BAD_WORDS_IDS: _encode_words(parameter.read(_BAD_WORDS, value), tokenizer)}


def _encode_words(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}  # ordered
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise ParameterError(
                    f"{_BAD_WORDS} has {short_repr(word)}, which has no tokens; remove it.", _BAD_WORDS
                )
            found[ids] = None
    return tuple(found)
