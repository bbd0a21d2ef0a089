"""Copy a tokenizer into an export, or convert it to `tokenizer.json`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from topw_deploy.errors import TokenizerError, one_line
from topw_deploy.export.write.rank_files import TEKKEN, build_tokenizer, is_tiktoken, read_tekken, read_tiktoken

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SAMPLES = (
    "the lazy dog",
    "a list of words",
    "The quick brown fox jumps over the lazy dog; then it returns 42 words!",
    "Wir fahren morgen nach München.",
    "東京は日本の首都です",
)
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that are copied without change."""
_CONVERTIBLE = (
    *SENTENCEPIECE,
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
    TEKKEN,
)
_TIKTOKEN = "*.tiktoken"
_OTHER_TEMPLATES = "additional_chat_templates"
"""transformers' folder of chat templates other than the default one."""
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def check_tokenizer(folder: Path) -> None:
    """Raises TokenizerError if `folder` has no tokenizer that can be copied or converted."""
    if (folder / "tokenizer.json").is_file():
        _check_readable(folder / "tokenizer.json")
    named = any((folder / name).is_file() for name in ("tokenizer.json", *_CONVERTIBLE))
    if not named and not any(folder.glob(_TIKTOKEN)):
        raise TokenizerError(
            f"{folder} has no tokenizer (neither tokenizer.json nor {', '.join((*_CONVERTIBLE, _TIKTOKEN))}); "
            "add it or give a folder that has it with --tokenizer."
        )


def _check_readable(file: Path) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception
        raise TokenizerError(f"{file} cannot be read ({one_line(error)}); fetch or save it again.") from None


def write_tokenizer(folder: Path, output: Path, *, trust_remote_code: bool = False) -> list[str]:
    """Write the tokenizer of `folder` into `output`. Returns notices for the user.

    `tokenizer.json` is copied. tekken.json and tiktoken's files are converted by rank_files.py, all others by
    transformers. A chat template in tokenizer_config.json becomes chat_template.jinja.
    Raises TokenizerError if the conversion fails.
    """
    notices = []
    if (folder / "tokenizer.json").is_file():
        _copy_tokenizer_files(folder, output)
    else:
        found = _rank_file(folder)
        if found is not None:
            _convert_ranks(found, output)
        else:
            _convert_with_transformers(folder, output, trust_remote_code)
        notices.append(f"the tokenizer of {folder.name} was converted to tokenizer.json")
    _extract_chat_template(output)
    return notices


def _copy_tokenizer_files(folder: Path, output: Path) -> None:
    for name in COPIED_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, output / name)


def _rank_file(folder: Path) -> Path | None:
    """Return the tekken.json or tiktoken file of `folder`, or None."""
    if (folder / TEKKEN).is_file():
        return folder / TEKKEN
    named = [folder / "tiktoken.model", folder / "tokenizer.model", *sorted(folder.glob(_TIKTOKEN))]
    return next((file for file in named if file.is_file() and is_tiktoken(file)), None)


def _convert_ranks(file: Path, output: Path) -> None:
    settings = _read_settings(file.parent)
    if file.name == TEKKEN:
        ranks, roles = read_tekken(file)
    else:
        ranks, roles = read_tiktoken(file, settings), {}
    roles |= {role: text for role in _ROLES if (text := _token_text(settings.get(role))) in ranks.specials}
    begin = roles.get("bos_token") if settings.get("add_bos_token", True) else None
    tokenizer = build_tokenizer(ranks, file, begin)
    _copy_tokenizer_files(file.parent, output)
    tokenizer.save(str(output / "tokenizer.json"))
    text = json.dumps({**settings, **roles}, indent=2, ensure_ascii=False)
    (output / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _token_text(value: object) -> str:
    """Return the text of a token, which a configuration states as text or as an object."""
    return str(value.get("content") if isinstance(value, dict) else value)


def _read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; {} if it is missing. Raises TokenizerError if it is damaged."""
    file = folder / "tokenizer_config.json"
    try:
        found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is damaged ({one_line(error)}); repair it.") from None
    return found if isinstance(found, dict) else {}


def _convert_with_transformers(folder: Path, output: Path, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer, LlamaTokenizer

    named = [folder / name for name in SENTENCEPIECE if (folder / name).is_file()]
    why = None
    # If no class is stated, transformers takes its general tokenizer, which omits the space that Llama's puts before a
    # text. So if the result differs from the SentencePiece model, try Llama's class.
    for kind in (AutoTokenizer, LlamaTokenizer) if named else (AutoTokenizer,):
        _save_fast(kind, folder, output, trust_remote_code)
        why = conversion_difference(named[0], output / "tokenizer.json") if named else None
        if why is None:
            break
    if why is not None:
        raise TokenizerError(
            f"the tokenizer in {folder} is converted wrongly by transformers ({why}); state its tokenizer_class in "
            "tokenizer_config.json, or give a folder that has tokenizer.json with --tokenizer."
        )
    for name in (*_CONVERTIBLE, "merges.txt"):
        (output / name).unlink(missing_ok=True)  # replaced by tokenizer.json
    shutil.rmtree(output / _OTHER_TEMPLATES, ignore_errors=True)  # chat uses the default template


def _save_fast(kind: Any, folder: Path, output: Path, trust_remote_code: bool) -> None:
    try:
        tokenizer = kind.from_pretrained(
            folder, use_fast=True, trust_remote_code=trust_remote_code, local_files_only=True
        )
        tokenizer.save_pretrained(output)
    except Exception as error:  # a tokenizer's own code can raise any error
        raise TokenizerError(
            f"the tokenizer in {folder} cannot be converted to tokenizer.json ({type(error).__name__}: "
            f"{one_line(error)}); convert it with transformers and give its folder with --tokenizer."
        ) from error
    if not (output / "tokenizer.json").is_file():
        raise TokenizerError(
            f"the tokenizer in {folder} has no fast form, so it cannot be saved as tokenizer.json; "
            "give a folder that has tokenizer.json with --tokenizer."
        )


def _extract_chat_template(output: Path) -> None:
    config = output / "tokenizer_config.json"
    if (output / "chat_template.jinja").exists() or not config.exists():
        return
    try:
        template = json.loads(config.read_text("utf-8")).get("chat_template")
    except (ValueError, AttributeError, RecursionError):
        return
    if isinstance(template, list):  # chat uses the default template
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if isinstance(template, str):
        (output / "chat_template.jinja").write_text(template, encoding="utf-8")


def conversion_difference(model: Path, converted: Path) -> str | None:
    """Describe the first sample that a converted tokenizer splits differently from the original; None if all agree.

    model: a SentencePiece file. One that SentencePiece cannot read is not compared.
    converted: a tokenizer.json.

    transformers converts by the tokenizer's class, or by general rules if the folder names no class. Those rules ignore
    some settings of a SentencePiece model, such as the space before a text. Samples with pieces that the model does not
    know are skipped.
    """
    import sentencepiece

    try:
        reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (OSError, RuntimeError):
        return None
    tokenizer = Tokenizer.from_file(str(converted))
    for sample in _SAMPLES:
        ids = reference.encode(sample)
        expected = [reference.id_to_piece(number) for number in ids]
        found = tokenizer.encode(sample, add_special_tokens=False).tokens
        if reference.unk_id() not in ids and found != expected:
            return f"{sample!r} becomes {found[:6]} instead of {expected[:6]}"
    return None
