"""Tokenizers that grow, stall or fill the memory, and chat templates that reach for Python.

Endless and growing templates: tests/runtime/template/test_bounds.py. Every mutation of a tokenizer:
tests/runtime/test_folder_fuzz.py.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.attacks import put, refused
from tests.support.special_files import no_hang
from tests.support.toy_model import byte_tokenizer
from topw_deploy.errors import PromptError, TokenizerError
from topw_deploy.manifest import DecoderManifest
from topw_deploy.runtime.chat import ChatTemplate
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.tokenizer import Tokenizer

Change = Callable[[dict[str, Any]], object]


def open_changed(folder: Path, change: Change) -> Tokenizer:
    data = json.loads(byte_tokenizer().to_str())
    change(data)
    put(folder, "tokenizer.json", json.dumps(data))
    return Tokenizer(ModelFolder(folder, DecoderManifest))


def set_steps(part: str, children: str, steps: list[dict[str, Any]]) -> Change:
    return lambda data: data.update({part: {"type": "Sequence", children: steps}})


def replace_step(old: Any, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": old, "content": new}


def set_template(single: list[dict[str, Any]], ids: list[int], processors: int = 1) -> Change:
    one = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}},
    }
    return lambda data: data.update(post_processor={"type": "Sequence", "processors": [one] * processors})


def charsmap(text: bytes) -> str:
    """A map whose trie is empty and whose longest replacement is `text`."""
    return base64.b64encode(struct.pack("<I", 4) + bytes(4) + text + b"\0").decode()


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXT, START = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
GROWING: dict[str, tuple[Change, str]] = {
    "replacements that double": (
        set_steps("normalizer", "normalizers", [replace_step({"String": "a"}, "aa")] * 30),
        "its normalizer can make 1073741824 characters of one, more than 1024",
    ),
    "one replacement that is long": (
        lambda data: data.update(normalizer=replace_step({"String": "a"}, "a" * 100_000)),
        "its normalizer can make 100000 characters of one, more than 1024",
    ),
    "an expression that matches everywhere": (
        lambda data: data.update(normalizer=replace_step({"Regex": ""}, "a" * 2000)),
        "its normalizer can make 2001 characters of one, more than 1024",
    ),
    "bytes of bytes": (
        set_steps("normalizer", "normalizers", [{"type": "ByteLevel"}] * 30),
        "its normalizer can make 1152921504606846976 characters of one, more than 1024",
    ),
    "bytes of bytes before the model": (
        set_steps("pre_tokenizer", "pretokenizers", [BYTE_LEVEL] * 20),
        "its pre_tokenizer can make 1099511627776 characters of one, more than 1024",
    ),
    "a decoder that doubles": (
        set_steps("decoder", "decoders", [replace_step({"String": "a"}, "aa")] * 30),
        "its decoder can make 1073741824 characters of one, more than 1024",
    ),
    "sequences within sequences": (
        set_steps(
            "normalizer",
            "normalizers",
            [{"type": "Sequence", "normalizers": [replace_step({"String": "a"}, "aaaa")] * 4}] * 4,
        ),
        "its normalizer can make 4294967296 characters of one, more than 1024",
    ),
    "a character map with a long entry": (
        lambda data: data.update(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap(b"a" * 5000)}),
        "its normalizer can make 5000 characters of one, more than 1024",
    ),
    "ten thousand steps": (
        set_steps("normalizer", "normalizers", [{"type": "Prepend", "prepend": "a" * 100}] * 10_000),
        "its normalizer has 10000 steps, more than 64",
    ),
    "a template that repeats the text": (
        set_template([TEXT, TEXT], [0], processors=30),
        "its post_processor repeats a text 2 times, not once",
    ),
    "a template that adds a thousand million tokens": (
        set_template([START] * 30_000 + [TEXT], [0] * 30_000),
        "its post_processor adds 900000000 tokens to a text, more than 4096",
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_tokenizer_that_multiplies_a_text_is_refused(folder: Path, name: str) -> None:
    change, reason = GROWING[name]
    with refused(TokenizerError, rf"tokenizer\.json cannot be read \({reason}\)"):
        open_changed(folder, change)


UNREAD: dict[str, bytes] = {
    "lists in lists": b"[" * 1_000_000,
    "objects in objects": b'{"model":' * 1_000_000,
    "no model": b"{}",
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix.".ljust(64, b"a"),
    "an id above 2**32": json.dumps({"model": {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}}).encode(),
    "a merge of unknown tokens": json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}).encode(),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_file_that_is_not_a_tokenizer_is_refused(folder: Path, name: str) -> None:
    put(folder, "tokenizer.json", UNREAD[name])
    kind = TokenizerError if name != "a pickle" else Exception
    with refused(kind, r"tokenizer\.json (cannot be read|is not UTF-8)"):  # type: ignore[arg-type]
        Tokenizer(ModelFolder(folder, DecoderManifest))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+b"])
def test_an_expression_that_backtracks_without_end_is_stopped(folder: Path, pattern: str) -> None:
    """Oniguruma gives up after ten million steps at one place."""

    def change(data: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}

    tokenizer = open_changed(folder, change)
    with refused(TokenizerError, "cannot be used"):
        tokenizer.encode("a" * 5000 + "!")


@pytest.mark.slow
def test_a_vocabulary_of_many_tokens_is_read(folder: Path) -> None:
    """It is legal, and costs what its file does. The graph decides which ids exist."""

    def change(data: dict[str, Any]) -> None:
        first = len(data["model"]["vocab"])
        data["model"]["vocab"] |= {f"token {number}": first + number for number in range(200_000)}

    with no_hang():
        tokenizer = open_changed(folder, change)
        assert tokenizer.vocab_size > 200_000
        assert tokenizer.encode("ab") == byte_tokenizer().encode("ab").ids


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ messages[0].__class__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''['__class__'] }}",
    "{{ [''.__class__]|map(attribute='__base__')|list }}",
    "{{ messages|map(attribute='__init__')|list }}",
    "{{ messages|groupby('__class__')|list }}",
    "{{ messages|sum(attribute='__len__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ '%s' % ''.format.__self__.__class__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ loop.__class__ }}",
    "{% for x in [1] %}{{ loop._iterable }}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{{ m.__globals__ }}{{ m._func }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
    "{% set ns = namespace(_x=1) %}{{ ns }}",
    "{{ range.__self__ }}{{ dict.__subclasses__() }}{{ dict.mro() }}",
    "{{ dict.fromkeys.__self__ }}",
    "{{ (1).__class__ }}{{ 1.5.__class__ }}",
    "{{ none.__class__ }}{{ true.__class__ }}",
    "{{ tools.__class__ }}{{ undefined.__class__.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}{{ x }}",
    "{% from '/etc/passwd' import x %}",
    "{% extends '/etc/passwd' %}",
    "{% do messages.clear() %}",
    "{{ messages.append(1) }}{{ messages[0].update(a=1) }}",
    "{% debug %}",
    "{{ get_flashed_messages.__globals__ }}{{ config }}{{ request }}{{ url_for }}",
)


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_does_not_reach_python(source: str) -> None:
    """It is refused, or prints nothing: Jinja's names that do not exist are empty."""
    messages = [{"role": "user", "content": "x"}]
    try:
        with no_hang():
            text = ChatTemplate(source, {}).render(messages)
    except (TokenizerError, PromptError):
        text = ""
    assert not any(shown in text for shown in ("class", "0x", "root:"))
    assert messages == [{"role": "user", "content": "x"}]
