"""Copy or convert the tokenizer to `tokenizer.json`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from topw_deploy.errors import TokenizerError, one_line

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that are copied unchanged."""
_CONVERTIBLE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")


def check_tokenizer(folder: Path) -> None:
    """Raises TokenizerError if `folder` has no exportable tokenizer."""
    if (folder / "tokenizer.json").is_file():
        _check_readable(folder / "tokenizer.json")
    if not any((folder / name).is_file() for name in ("tokenizer.json", *_CONVERTIBLE)):
        raise TokenizerError(
            f"{folder} has no tokenizer (neither tokenizer.json nor {', '.join(_CONVERTIBLE)}); "
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

    transformers converts forms other than `tokenizer.json`. A chat template in tokenizer_config.json becomes
    chat_template.jinja. Raises TokenizerError if conversion fails.
    """
    notices = []
    if (folder / "tokenizer.json").is_file():
        for name in COPIED:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, output / name)
    else:
        _convert(folder, output, trust_remote_code)
        notices.append(f"the tokenizer of {folder.name} was converted to tokenizer.json")
    _extract_chat_template(output)
    return notices


def _convert(folder: Path, output: Path, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
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
    for name in (*_CONVERTIBLE, "merges.txt"):
        (output / name).unlink(missing_ok=True)  # replaced by tokenizer.json


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
