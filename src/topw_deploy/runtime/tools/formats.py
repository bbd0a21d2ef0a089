"""The table of tool-call formats: how the models of each family of chat templates write calls.

A format's texts are read and, for `tool_choice="required"`, written as a grammar. These fields stand for values:

{object}: a JSON object with the tool's name and its arguments.
{name}, {id}: the tool's name, the call's id.
{arguments}: a mapping of the arguments, in the format's dialect.
{call}: `name(key=value, ...)`; {builtin}: `name.call(key=value, ...)`.
{tags}: `name>`, then a tag per parameter or a JSON object, then `</function>`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools.literals import GEMMA, GEMMA_4, JSON, PYTHON, Dialect


@dataclass(frozen=True)
class Format:
    """One way to write the calls of an answer. White space is optional when reading.

    call: one call. Markers and fences after its arguments may be missing at the end of the answer.
    opener: the text that begins calls, in the middle of an answer too; "" if only the answer's start can be a call.
    begin, between, end: the texts after the opener, between calls and after the last one; between: None if an opener
        has one call. Only unmarked lists and markers need an `end`.
    whole: whether a list with a malformed call has no calls.
    key: name of an object's arguments, in a grammar.
    dialect: how arguments are written.
    written: whether a grammar writes calls in this format. A text: if the tokenizer has this special token.
    reasoning: the texts around reasoning before the calls. A grammar allows it if the markers in them are special
        tokens; otherwise a grammar cannot detect its end.
    """

    call: str
    opener: str = ""
    begin: str = ""
    between: str | None = None
    end: str = ""
    whole: bool = False
    key: str = "arguments"
    dialect: Dialect = JSON
    written: bool | str = False
    reasoning: tuple[str, str] | None = None


@dataclass(frozen=True)
class Family:
    """The formats of some models, in the order in which they are tried.

    markers: the special texts of the formats. No opener or marker begins with another one.
    thinking: the texts before and after reasoning at the start of the answer; None without reasoning.
    rethinks: whether reasoning may follow content.
    channels: whether an answer consists of Harmony's messages, in channels.
    short_ids: whether a call's id must have 9 letters and digits, as Mistral's templates require.
    """

    name: str
    formats: tuple[Format, ...]
    markers: tuple[str, ...]
    thinking: tuple[str, str] | None = None
    rethinks: bool = False
    channels: bool = False
    short_ids: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The texts that begin a call, a message, or reasoning after content."""
        if self.channels:
            return ("<|start|>", "<|channel|>")
        again = self.thinking[:1] if self.thinking and self.rethinks else ()
        return (*dict.fromkeys(form.opener for form in self.formats if form.opener), *again)


THINK = ("<think>", "</think>")
_PYTHON_LIST = Format("{call}", begin="[", between=", ", end="]", whole=True, dialect=PYTHON, written=True)
FAMILIES = {
    family.name: family
    for family in (
        Family(
            "hermes",
            (
                Format("\n{object}\n</tool_call>", "<tool_call>", between="\n<tool_call>", written=True),
                Format("\n<function={tags}\n</tool_call>", "<tool_call>", between="\n<tool_call>"),  # Qwen3-Coder
                # Qwen3-Coder sometimes leaves out `<tool_call>`, though not `</tool_call>`.
                Format("{tags}", "<function=", end="</tool_call>"),
            ),
            markers=("<tool_call>", "</tool_call>", *THINK),
            thinking=THINK,
        ),
        Family(
            "llama",
            (
                Format("{object}", between="; ", key="parameters", written=True),
                Format("{object}", "<|python_tag|>", between="; "),
                Format("{builtin}", "<|python_tag|>", dialect=PYTHON),
                Format("{tags}", "<function="),
            ),
            markers=("<|python_tag|>",),
        ),
        Family(
            "mistral",
            (
                Format("{object}", "[TOOL_CALLS]", begin="[", between=", ", end="]", written=True),
                Format("{object}", "[TOOL_CALLS]"),
                # since tokenizer v11
                Format("{name}[CALL_ID]{id}[ARGS]{arguments}", "[TOOL_CALLS]"),
                Format("{name}[ARGS]{arguments}", "[TOOL_CALLS]", between="[TOOL_CALLS]", written="[ARGS]"),
                Format("{name}{arguments}", "[TOOL_CALLS]"),
            ),
            markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
            thinking=("[THINK]", "[/THINK]"),
            short_ids=True,
        ),
        Family(
            "gemma",
            (
                Format(  # FunctionGemma
                    "call:{name}{arguments}<end_function_call>",
                    "<start_function_call>",
                    between="<start_function_call>",
                    dialect=GEMMA,
                    written=True,
                ),
                Format(  # Gemma 4
                    "call:{name}{arguments}<tool_call|>",
                    "<|tool_call>",
                    between="<|tool_call>",
                    dialect=GEMMA_4,
                    written="<|tool_call>",
                    reasoning=("<|channel>thought\n", "<channel|>"),
                ),
            ),
            markers=(
                *("<start_function_call>", "<end_function_call>", "<escape>"),
                *("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
            ),
            thinking=("<|channel>thought", "<channel|>"),
            rethinks=True,
        ),
        Family(
            "pythonic",
            (
                _PYTHON_LIST,  # Gemma 3, Llama 3.2
                Format("{call}", "```tool_code", between="", end="```", dialect=PYTHON),
                Format(  # LFM2
                    "{call}",
                    "<|tool_call_start|>",
                    begin="[",
                    between=", ",
                    end="]<|tool_call_end|>",
                    whole=True,
                    dialect=PYTHON,
                    written="<|tool_call_start|>",
                ),
            ),
            markers=("<|tool_call_start|>", "<|tool_call_end|>", *THINK),
            thinking=THINK,
        ),
        Family(
            "harmony",  # gpt-oss
            (
                Format(  # the end of the call, <|call|>, is one of gpt-oss's ends of sequence
                    "commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
                    "<|channel|>",
                    written=True,
                    reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
                ),
            ),
            markers=(
                *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
                *("<|end|>", "<|call|>", "<|return|>"),
            ),
            channels=True,
        ),
        Family(
            "deepseek",
            tuple(
                Format(call, "<｜tool▁calls▁begin｜>", between="", end="<｜tool▁calls▁end｜>")
                for call in (
                    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",  # V3.1
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
                )
            ),
            markers=(
                *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
                *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", *THINK),
            ),
            thinking=THINK,
        ),
    )
}

PLAIN, REASONING = Family("plain", (), ()), Family("reasoning", (), THINK, THINK)
"""How answers are read if the family is unknown: as they are, or with reasoning at their start."""

# A family and the texts that must occur; texts that must not occur begin with "!". The first match counts.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma", ("<|tool_call>", "<tool_call|>")),
    ("gemma", ("<start_function_call>",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("hermes", ("<tool_call>", "!<arg_key>", "!<tool_sep>", "!<tool_calls>")),  # these are GLM's, Hunyuan's, Apriel's
    ("llama", ("<|python_tag|>",)),
    ("llama", ("<|start_header_id|>", '"parameters"', "ipython")),
)


def detect(template: str | None, tokens: Collection[str] = ()) -> str | None:
    """Detect the family of a model. Returns its name, or None if it is unknown.

    template: a chat template.
    tokens: the tokenizer's added tokens, which count if the template shows no calls.
    """
    for text in (template or "", "\n".join(tokens)):
        for family, signs in _SIGNS:
            if all((sign[1:] not in text) if sign.startswith("!") else (sign in text) for sign in signs):
                return family
    return None


def get_family(name: str, parameter: str = "family") -> Family:
    """Returns the family with this name. Raises ParameterError, which names `parameter`, for an unknown name."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise ParameterError(f"{parameter} is {name!r}, but must be one of {', '.join(FAMILIES)}.", parameter)
    return FAMILIES[name]
