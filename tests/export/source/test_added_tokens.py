"""An export has the tokens and chat templates that transformers loads, wherever the source's files state them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.editing import edit_json
from tests.support.tiny_models import VOCAB, export, write_checkpoint
from tests.support.tiny_models import write_tokenizer as write_tiny_tokenizer
from topw_deploy.errors import TokenizerError
from topw_deploy.export.source import tokenizer as tokenizer_files
from topw_deploy.export.source.tokenizer import tokenizer_difference, write_tokenizer
from topw_deploy.manifest import SourceTokens, load_decoder_manifest
from topw_deploy.runtime import TopWModel

TEXTS = ("<|a|>user hi<|b|>", "x <|a|> y <|b|> z", "x<|a|>y", "x  <|b|>  y", "<|A|> plain")
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
DEFAULT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TOOL_USE = "TOOLS {% for t in tools %}{{ t.function.name }} {% endfor %}" + DEFAULT
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "llama_tied")


def first_free(folder: Path) -> int:
    """The id after the vocabulary's."""
    return 1 + max(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values())


def in_decoder(**flags: bool) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        first, stated = first_free(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = {str(n): {**FLAGS, "content": token.content} for n, token in stated.get_added_tokens_decoder().items()}
        added |= {str(first + place): {**FLAGS, **flags, "content": f"<|{c}|>"} for place, c in enumerate("ab")}
        edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added)

    return prepare


def in_added_tokens_json(folder: Path) -> None:
    first = first_free(folder)
    edit_json(folder / "added_tokens.json", **{"<|a|>": first, "<|b|>": first + 1})


def in_settings(**settings: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "tokenizer_config.json", **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    "prepare",
    [
        in_decoder(),
        in_decoder(lstrip=True),
        in_decoder(rstrip=True),
        in_decoder(single_word=True),
        in_decoder(normalized=True),
        in_decoder(special=False),
        in_added_tokens_json,
        in_settings(extra_special_tokens=["<|a|>", "<|b|>"]),
        in_settings(extra_special_tokens={"image_token": "<|a|>", "end_token": "<|b|>"}),
        in_settings(additional_special_tokens=["<|a|>", "<|b|>"]),
        in_settings(additional_special_tokens=[{"__type": "AddedToken", **FLAGS, "content": "<|a|>", "lstrip": True}]),
        in_settings(eos_token="<|b|>"),
        in_settings(eos_token={"__type": "AddedToken", **FLAGS, "content": "<|b|>", "rstrip": True}),
        lambda folder: edit_json(folder / "special_tokens_map.json", eos_token="<|b|>"),
    ],
)
def test_every_stated_added_token_is_encoded_and_decoded_as_by_transformers(
    prepare: Callable[[Path], None], folder: Path, tmp_path: Path
) -> None:
    prepare(folder)
    expected = AutoTokenizer.from_pretrained(folder)
    report = export(folder, tmp_path / "out")
    with TopWModel.from_pretrained(tmp_path / "out") as model:
        found = model.tokenizer
        for text in TEXTS:
            ids = expected(text)["input_ids"]
            assert found.encode(text) == ids
            for skip in (True, False):
                assert found.decode(ids, skip) == expected.decode(ids, skip_special_tokens=skip)
        assert set(found.added_tokens) >= {str(token) for token in expected.added_tokens_decoder.values()}
        assert found.eos_token_id == expected.eos_token_id
    changed = any("<|" in str(token) for token in expected.added_tokens_decoder.values())
    assert any("written as transformers loads it" in notice for notice in report.notices) == changed
    tokens = load_decoder_manifest(tmp_path / "out").source_tokens
    assert tokens == SourceTokens(
        made="adopted" if changed else "compared", added=len(expected.added_tokens_decoder), templates=0
    )


def test_a_tokenizer_that_tokenizer_json_cannot_express_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(AutoTokenizer.from_pretrained(folder))
    monkeypatch.setattr(kind, "decode", lambda self, ids, **_settings: "other text")
    (tmp_path / "out").mkdir()
    with pytest.raises(TokenizerError, match=r"cannot express .*'other text'.*--tokenizer"):
        write_tokenizer(folder, tmp_path / "out")


def test_a_tokenizer_that_transformers_cannot_load_is_copied_with_a_note(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "_load_with_transformers", lambda *_: ValueError("no such class"))
    (tmp_path / "out").mkdir()
    (notice,), tokens = write_tokenizer(folder, tmp_path / "out")
    assert (tokens.made, tokens.templates) == ("copied", 0)
    assert "cannot load the tokenizer (no such class)" in notice


def in_list(folder: Path) -> None:
    named = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOL_USE}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)


def in_files(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template="{{ 'not read' }}")
    (folder / "chat_template.jinja").write_text(DEFAULT)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [in_list, in_files])
def test_a_chat_with_tools_is_rendered_by_the_template_for_tools(
    prepare: Callable[[Path], None], folder: Path, tmp_path: Path
) -> None:
    prepare(folder)
    report = export(folder, tmp_path / "out")
    assert not any("rendered" in notice for notice in report.notices)
    expected = AutoTokenizer.from_pretrained(folder)
    with TopWModel.from_pretrained(tmp_path / "out") as model:
        for tools in (None, TOOLS):
            text = expected.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
            assert model.apply_chat_template(MESSAGES, tools=tools) == text
            assert text.startswith("TOOLS f") is (tools is not None)


@pytest.mark.parametrize(("stated", "plain"), [(None, "TOOLS [user]hi"), (DEFAULT, "[user]hi")])
def test_a_template_for_tools_needs_no_default_in_a_file(
    stated: str | None, plain: str, folder: Path, tmp_path: Path
) -> None:
    in_files(folder)
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=stated)
    report = export(folder, tmp_path / "out")
    assert sum("rendered as" in notice and "transformers as '(refused)'" in notice for notice in report.notices) == 1
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    with TopWModel.from_pretrained(tmp_path / "out") as model:
        assert model.apply_chat_template(MESSAGES, tools=TOOLS) == expected
        assert model.apply_chat_template(MESSAGES) == plain


def test_the_template_of_a_processor_is_used_with_a_note(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "chat_template.json", chat_template=DEFAULT)
    report = export(folder, tmp_path / "out")
    assert "the chat template is that of chat_template.json" in report.notices
    with TopWModel.from_pretrained(tmp_path / "out") as model:
        assert model.apply_chat_template(MESSAGES) == "[user]hi"


def test_a_chat_that_is_rendered_differently_is_noted(folder: Path, tmp_path: Path) -> None:
    """A variable that only transformers passes."""
    (folder / "chat_template.jinja").write_text("{{ messages[0].content.title() }}{{ [1, 2] | sum if tools else '' }}")
    edit_json(folder / "tokenizer_config.json", sep_token="<s>", model_specific_special_tokens={"image_token": "<s>"})
    (folder / "chat_template.jinja").write_text("{{ image_token if image_token is defined else 'none' }}")
    report = export(folder, tmp_path / "out")
    assert sum("is rendered as 'none', but by transformers as '<s>'" in notice for notice in report.notices) == 2


def test_a_difference_names_the_text(folder: Path) -> None:
    in_decoder()(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert str(tokenizer_difference(loaded, folder / "tokenizer.json")).startswith("'of<|a|>words' becomes")


def test_tokens_that_the_models_table_lacks_are_noted(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "tokenizer_config.json", extra_special_tokens=[f"<|{number}|>" for number in range(50)])
    assert len(AutoTokenizer.from_pretrained(folder)) == VOCAB + 10
    report = export(folder, tmp_path / "out")
    (notice,) = (notice for notice in report.notices if "table" in notice)
    assert f"has 10 tokens that the model's table of {VOCAB} rows lacks (first: '<|40|>', id {VOCAB})" in notice


def test_a_class_that_needs_tokens_which_the_file_lacks_is_replaced_by_the_general_one(
    folder: Path, tmp_path: Path
) -> None:
    edit_json(folder / "tokenizer_config.json", tokenizer_class="GemmaTokenizerFast")
    with pytest.raises(Exception, match="Unk token"):
        AutoTokenizer.from_pretrained(folder)("x é")
    (tmp_path / "out").mkdir()
    assert write_tokenizer(folder, tmp_path / "out")[1].made == "compared"


ENTRIES = st.lists(
    st.tuples(
        st.integers(-3, 3),  # relative to the end of the vocabulary
        st.sampled_from(["<|a|>", "<|b|>", "user", " y", "é", "<s>"]),
        st.fixed_dictionaries({flag: st.booleans() for flag in FLAGS}),
    ),
    max_size=3,
)


@pytest.mark.slow
@given(
    entries=ENTRIES,
    settings_=st.fixed_dictionaries(
        {},
        optional={
            "eos_token": st.sampled_from(["<|b|>", "user", ""]),
            "extra_special_tokens": st.just(["<|a|>"]),
            "add_bos_token": st.booleans(),
            "split_special_tokens": st.booleans(),
            "tokenizer_class": st.sampled_from(["GPT2Tokenizer", "LlamaTokenizerFast", "NoSuchTokenizer"]),
        },
    ),
)
@settings(max_examples=40)
def test_tokens_of_random_files_are_those_of_transformers_or_refused(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Any], settings_: dict[str, Any]
) -> None:
    folder, output = tmp_path_factory.mktemp("tokens"), tmp_path_factory.mktemp("out")
    write_tiny_tokenizer(folder)
    end = first_free(folder)
    added = {str(end + place): {**flags, "content": text} for place, text, flags in entries}
    edit_json(folder / "tokenizer_config.json", **settings_, **({"added_tokens_decoder": added} if added else {}))
    try:
        write_tokenizer(folder, output)
    except TokenizerError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert not refusal or "cannot express" in refusal
    if refusal:
        return
    expected = AutoTokenizer.from_pretrained(folder)
    written = tokenizers.Tokenizer.from_file(str(output / "tokenizer.json"))
    for text in (*TEXTS, "user y é <s>"):
        ids = expected(text)["input_ids"]
        assert written.encode(text).ids == ids
        for skip in (True, False):
            plain = expected.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert written.decode(ids, skip_special_tokens=skip) == plain
