"""Copy or convert the tokenizer to `tokenizer.json`."""

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
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that are copied unchanged."""
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
    """Raises TokenizerError if `folder` has no exportable tokenizer."""
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
    """Write the tokenizer into `output`; returns notices.

    tekken.json and tiktoken's files are converted here (rank_files.py), forms other than `tokenizer.json` by
    transformers. A chat template in tokenizer_config.json becomes chat_template.jinja. Raises TokenizerError if
    conversion fails.
    """
    notices = []
    if (folder / "tokenizer.json").is_file():
        _copy(folder, output)
    else:
        found = _rank_file(folder)
        if found is not None:
            _convert_ranks(found, output)
        else:
            _convert(folder, output, trust_remote_code)
        notices.append(f"the tokenizer of {folder.name} was converted to tokenizer.json")
    _extract_chat_template(output)
    return notices


def _copy(folder: Path, output: Path) -> None:
    for name in COPIED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, output / name)


def _rank_file(folder: Path) -> Path | None:
    """The folder's tekken.json or tiktoken file."""
    if (folder / TEKKEN).is_file():
        return folder / TEKKEN
    named = [folder / "tiktoken.model", folder / "tokenizer.model", *sorted(folder.glob(_TIKTOKEN))]
    return next((file for file in named if file.is_file() and is_tiktoken(file)), None)


def _convert_ranks(file: Path, output: Path) -> None:
    settings = _settings(file.parent)
    if file.name == TEKKEN:
        ranks, roles = read_tekken(file)
    else:
        ranks, roles = read_tiktoken(file, settings), {}
    roles |= {role: text for role in _ROLES if (text := _text(settings.get(role))) in ranks.specials}
    begin = roles.get("bos_token") if settings.get("add_bos_token", True) else None
    tokenizer = build_tokenizer(ranks, file, begin)
    _copy(file.parent, output)
    tokenizer.save(str(output / "tokenizer.json"))
    text = json.dumps({**settings, **roles}, indent=2, ensure_ascii=False)
    (output / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _text(value: object) -> str:
    """Of a token that a configuration states as text or as an object."""
    return str(value.get("content") if isinstance(value, dict) else value)


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, {} if absent. Raises TokenizerError for a damaged one."""
    file = folder / "tokenizer_config.json"
    try:
        found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is damaged ({one_line(error)}); repair it.") from None
    return found if isinstance(found, dict) else {}


def _convert(folder: Path, output: Path, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer, LlamaTokenizer

    named = [folder / name for name in SENTENCEPIECE if (folder / name).is_file()]
    why = None
    # Without a stated class, transformers' general tokenizer ignores the space before a text, which Llama's writes.
    for kind in (AutoTokenizer, LlamaTokenizer) if named else (AutoTokenizer,):
        _save_fast(kind, folder, output, trust_remote_code)
        why = difference(named[0], output / "tokenizer.json") if named else None
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
    except Exception as error:  # tokenizers can run their own code
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


def difference(model: Path, converted: Path) -> str | None:
    """Describe the first sample that `converted`, a tokenizer.json, splits differently from `model`; None if none.

    transformers converts by the tokenizer's class, or by general rules if the folder names no class. Those rules ignore
    some settings of a SentencePiece model, such as the space before a text.

    Skips samples with pieces unknown to the model, and models that SentencePiece cannot read.
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
