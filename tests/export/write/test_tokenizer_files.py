"""Every tokenizer becomes tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer

from tests.support.editing import edit_json
from topw_deploy.errors import TokenizerError
from topw_deploy.export.source.tokenizer import check_tokenizer, write_tokenizer
from topw_deploy.tiny import TINY_MODEL

TEXT = "the quick brown fox jumps over the lazy dog and returns a list of words"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def sentencepiece_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "text").write_text("\n".join([TEXT] * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=60,
        model_type="bpe",
        byte_fallback=False,
        character_coverage=1.0,
        minloglevel=2,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_tokenizer_json_is_copied_byte_for_byte(tmp_path: Path) -> None:
    notices, tokens = write_tokenizer(TINY_MODEL, tmp_path)
    assert (notices, tokens.made) == ([], "compared")
    assert (tmp_path / "tokenizer.json").read_bytes() == (TINY_MODEL / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("template", ["{{ messages }}", [{"name": "default", "template": "{{ messages }}"}]])
def test_a_chat_template_in_the_configuration_becomes_a_file(tmp_path: Path, output: Path, template: object) -> None:
    source = tmp_path / "in"
    source.mkdir()
    shutil.copyfile(TINY_MODEL / "tokenizer.json", source / "tokenizer.json")
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    write_tokenizer(source, output)
    assert (output / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_folder_without_a_tokenizer_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer .* --tokenizer"):
        check_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_be_converted_names_the_reason(tmp_path: Path, output: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(TokenizerError, match=r"cannot be converted|no fast form"):
        write_tokenizer(tmp_path, output)


def test_a_damaged_tokenizer_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        check_tokenizer(tmp_path)


@pytest.mark.parametrize("settings", ["as saved", None, {"legacy": False}])
def test_a_sentencepiece_model_is_converted(settings: object, sentencepiece_folder: Path, output: Path) -> None:
    """transformers' general tokenizer, which it takes where no class is stated, leaves out the first space."""
    if settings != "as saved":
        (sentencepiece_folder / "tokenizer_config.json").unlink()
    if isinstance(settings, dict):
        (sentencepiece_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "converted" in write_tokenizer(sentencepiece_folder, output)[0][0]
    ids = Tokenizer.from_file(str(output / "tokenizer.json")).encode("the lazy dog", add_special_tokens=False).ids
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    assert ids == reference.encode("the lazy dog")
    assert not (output / "tokenizer.model").exists()


def test_a_conversion_keeps_several_chat_templates(sentencepiece_folder: Path, output: Path) -> None:
    templates = [{"name": name, "template": f"{{{{ {name} }}}}"} for name in ("default", "tool_use")]
    edit_json(sentencepiece_folder / "tokenizer_config.json", chat_template=templates)
    write_tokenizer(sentencepiece_folder, output)
    assert (output / "chat_template.jinja").read_text() == "{{ default }}"
    assert (output / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tool_use }}"


def test_a_wrong_conversion_is_refused(
    sentencepiece_folder: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    (sentencepiece_folder / "tokenizer_config.json").unlink()
    monkeypatch.setattr(transformers, "LlamaTokenizer", transformers.AutoTokenizer)
    with pytest.raises(
        TokenizerError, match=r"converted wrongly .*'the lazy dog' becomes .*; state its tokenizer_class"
    ):
        write_tokenizer(sentencepiece_folder, output)
