"""Copy a tokenizer into an export, or convert it to `tokenizer.json`.

tekken.json and tiktoken's text files list byte strings by rank. Such a tokenizer splits text by a pattern. In each
piece, it merges the adjacent pair whose joined bytes have the lowest rank, until no pair has a rank. The BPE of
`tokenizers` ranks pairs instead: here, every way to split a token into two becomes a merge, and merges are ordered by
the rank of the token that they make.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from topw_deploy.errors import SourceError, TokenizerError, one_line
from topw_deploy.export.source.files import read_json
from topw_deploy.folders import is_file_name
from topw_deploy.manifest import ModelFolder, SourceTokens, TokenizerOrigin
from topw_deploy.runtime.chat import TEMPLATE_FILE, TEMPLATES_FOLDER, load_chat_template, named_templates
from topw_deploy.runtime.tokenizer import CONFIG_FILE
from topw_deploy.runtime.tokenizer import Tokenizer as RuntimeTokenizer

TEKKEN = "tekken.json"
_TEKKEN_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_UNNAMED_SPECIAL = "<SPECIAL_{}>"
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n?")
_LETTERS_AND_NUMBERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Number of ranks of a tiktoken file, which does not state its pattern -> (model family, pattern).
_KNOWN_PATTERNS = {
    128_000: ("Llama 3", _LETTERS_AND_NUMBERS.format("{1,3}")),
    151_643: ("Qwen", _LETTERS_AND_NUMBERS.format("")),
}


@dataclass(frozen=True)
class Ranks:
    """What a file of ranks says about its tokenizer.

    tokens: the bytes of each token, by rank.
    first: the id of the token of rank 0.
    pattern: the regular expression that splits text into pieces.
    specials: text of an added token -> id.
    plain: texts of added tokens that are not special.
    """

    tokens: list[bytes]
    first: int
    pattern: str
    specials: Mapping[str, int]
    plain: frozenset[str] = frozenset()


def read_tekken(path: Path) -> tuple[Ranks, dict[str, str]]:
    """Read mistral-common's `tekken.json`. Returns (ranks, {role: special token}).

    The ids of special tokens come first, as many as the file states; unnamed ones are `<SPECIAL_n>`. As many ranks
    follow as fit into the stated size of the vocabulary. Raises TokenizerError for other contents.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        config, stated = data["config"], data.get("special_tokens")
        if stated is None:
            raise TokenizerError(
                f"{path} is of a version that does not state its special tokens; convert it with mistral-common or "
                "transformers, and give the folder of the tokenizer.json with --tokenizer."
            )
        stated = sorted(stated, key=lambda entry: int(entry["rank"]))
        texts = [str(entry["token_str"]) for entry in stated]
        if [int(entry["rank"]) for entry in stated] != list(range(len(stated))):
            raise ValueError("the ranks of its special tokens have gaps")
        first = int(config.get("default_num_special_tokens") or len(texts))
        size = config.get("default_vocab_size")
        if size is not None and int(size) < first:
            raise ValueError(f"its vocabulary of {size} tokens is smaller than its {first} special tokens")
        entries = data["vocab"][: None if size is None else int(size) - first]
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        pattern = str(config["pattern"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TokenizerError(f"{path} is damaged ({one_line(error)}); fetch it again.") from None
    specials = {text: place for place, text in enumerate(texts)}
    specials |= {_UNNAMED_SPECIAL.format(place): place for place in range(len(texts), first)}
    return Ranks(tokens, first, pattern, specials), {
        role: text for role, text in _TEKKEN_ROLES.items() if text in specials
    }


def is_tiktoken(path: Path) -> bool:
    """Whether a file begins with a line of base64 and a rank; SentencePiece's `tokenizer.model` does not."""
    with path.open("rb") as stream:
        return _LINE.fullmatch(stream.readline(1000)) is not None


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> Ranks:
    """Read a text file of tiktoken. settings: the tokenizer_config.json, which states the special tokens.

    Raises TokenizerError for other contents, and for an unknown pattern or unknown special tokens.
    """
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        tokens = [base64.b64decode(token, validate=True) for token, _ in pairs]
        if [int(rank) for _, rank in pairs] != list(range(len(pairs))):
            raise ValueError("its ranks have gaps")
    except (OSError, ValueError, binascii.Error) as error:
        raise TokenizerError(f"{path} is damaged ({one_line(error)}); fetch it again.") from None
    stated = settings.get("added_tokens_decoder")
    entries = stated.items() if isinstance(stated, dict) else ()
    named = [(number, entry) for number, entry in entries if isinstance(entry, dict) and str(number).isdigit()]
    specials = {str(entry["content"]): int(number) for number, entry in named if "content" in entry}
    plain = frozenset(str(entry.get("content")) for _, entry in named if not entry.get("special"))
    if len(tokens) not in _KNOWN_PATTERNS or not specials:
        raise TokenizerError(
            f"{path} is a tiktoken file of {len(tokens)} ranks whose pattern is unknown or whose special tokens are "
            "not in tokenizer_config.json; convert it with transformers' TikTokenConverter and the pattern and special "
            "tokens of the model's code, and give the folder of the tokenizer.json with --tokenizer."
        )
    return Ranks(tokens, 0, _KNOWN_PATTERNS[len(tokens)][1], specials, plain)


def build_tokenizer(ranks: Ranks, path: Path, begin: str | None) -> Tokenizer:
    """Build the tokenizer.

    path: the file of the ranks, for messages.
    begin: the special token that starts each text, or None.
    Raises TokenizerError for ranks that tokenizer.json cannot express.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ids = {token: ranks.first + rank for rank, token in enumerate(ranks.tokens)}
    converter = TikTokenConverter()
    converter.load_tiktoken_bpe = lambda _: ids  # instead of a file, of which it would take the ids too
    vocabulary, merges = converter.extract_vocab_merges_from_model(str(path))
    whole = all(bytes([byte]) in ids for byte in range(256)) and len(ids) == len(ranks.tokens)
    if not whole or vocabulary.keys() & ranks.specials.keys() or set(ids.values()) & set(ranks.specials.values()):
        raise TokenizerError(
            f"{path} is damaged (a byte has no rank, or a token has two, or the text or id of a special token); fetch "
            "it again, or give another folder with --tokenizer."
        )
    try:
        tokenizer = Tokenizer(models.BPE({**ranks.specials, **vocabulary}, merges, ignore_merges=True))
        pieces = pre_tokenizers.Split(Regex(ranks.pattern), "isolated")
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception
        raise TokenizerError(f"{path} cannot be converted ({one_line(error)}); fetch it again.") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    ordered = sorted(ranks.specials, key=lambda text: ranks.specials[text])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=text not in ranks.plain) for text in ordered])
    if begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, ranks.specials[begin])]
        )
    return tokenizer


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
    TEMPLATE_FILE,
)
"""Files that are copied without change."""
_CONVERTIBLE = (*SENTENCEPIECE, "vocab.json", "vocab.txt", "tiktoken.model", TEKKEN)
_TIKTOKEN = "*.tiktoken"
_PROCESSOR_TEMPLATE = "chat_template.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def check_tokenizer(folder: Path) -> None:
    """Raises TokenizerError if `folder` has no tokenizer that can be copied or converted."""
    if (folder / "tokenizer.json").is_file():
        try:
            Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # noqa: BLE001  # the library raises bare Exception
            reason = one_line(error)
            raise TokenizerError(
                f"{folder / 'tokenizer.json'} cannot be read ({reason}); fetch or save it again."
            ) from None
    elif not any(file for name in (*_CONVERTIBLE, _TIKTOKEN) for file in folder.glob(name)):
        raise TokenizerError(
            f"{folder} has no tokenizer (neither tokenizer.json nor {', '.join((*_CONVERTIBLE, _TIKTOKEN))}); "
            "add it or give a folder that has it with --tokenizer."
        )


def write_tokenizer(folder: Path, output: Path, *, trust_remote_code: bool = False) -> tuple[list[str], SourceTokens]:
    """Write the tokenizer of `folder` into `output`. Returns (notices for the user, what became of the tokenizer).

    `tokenizer.json` is copied, or written as transformers loads it if other files change it. tekken.json and tiktoken's
    files are converted here, all others by transformers. Chat templates in JSON files become files of their own.
    Raises TokenizerError if the conversion fails, or if the result differs from the tokenizer that transformers loads.
    """
    if (folder / "tokenizer.json").is_file():
        _copy_tokenizer_files(folder, output)
        made, notices = _adopt_loaded_tokenizer(folder, output, trust_remote_code)
    else:
        changes = _convert_tokenizer(folder, output, trust_remote_code)
        made, notices = "converted", [f"the tokenizer of {folder.name} was converted to tokenizer.json", *changes]
    notices += _write_templates(folder, output)
    added = Tokenizer.from_file(str(output / "tokenizer.json")).get_added_tokens_decoder()
    return notices, SourceTokens(made=made, added=len(added), templates=len(_template_files(output)))


def _convert_tokenizer(folder: Path, output: Path, trust_remote_code: bool) -> list[str]:
    """Convert the tokenizer of `folder`. Returns notices for the user."""
    patterns = (TEKKEN, "tiktoken.model", "tokenizer.model", _TIKTOKEN)
    found = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    files = [file for file in found if file.is_file() and (file.name == TEKKEN or is_tiktoken(file))]
    if not files:
        _convert_with_transformers(folder, output, trust_remote_code)
        return []
    _convert_ranks(files[0], output)
    # The files copied beside it may state more tokens, or other flags of them.
    return _adopt_loaded_tokenizer(output, output, trust_remote_code)[1]


def _copy_tokenizer_files(folder: Path, output: Path) -> None:
    for name in COPIED_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, output / name)


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


def _read_settings(folder: Path, name: str = CONFIG_FILE) -> dict[str, Any]:
    """Read a JSON file; {} if it is missing. Raises TokenizerError if it is damaged."""
    try:
        return read_json(folder / name)
    except SourceError as error:
        raise TokenizerError(str(error)) from None


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


def _write_templates(folder: Path, output: Path) -> list[str]:
    """Write the chat templates of `folder` as files into `output`. Returns notices for the user.

    Like transformers, uses templates in files if there are any, else those of tokenizer_config.json. The template of a
    processor, in chat_template.json, is used if the tokenizer has none.
    """
    templates = {str(file.relative_to(folder)): file.read_text("utf-8") for file in _template_files(folder)}
    notices = []
    if not templates:
        templates = _stated_templates(folder, CONFIG_FILE)
    if not templates:
        templates = _stated_templates(folder, _PROCESSOR_TEMPLATE)
        notices = [f"the chat template is that of {_PROCESSOR_TEMPLATE}"] * bool(templates)
    for name, text in templates.items():
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text(text, "utf-8")
    return notices


def _template_files(folder: Path) -> list[Path]:
    return [*folder.glob(TEMPLATE_FILE), *folder.glob(f"{TEMPLATES_FOLDER}/*.jinja")]


def _stated_templates(folder: Path, name: str) -> dict[str, str]:
    """Return the templates in a JSON file of `folder`, by the name of the file to write."""
    stated = _read_settings(folder, name).get("chat_template")
    named = {} if stated is None else named_templates(stated)
    return {
        TEMPLATE_FILE if role == "default" else f"{TEMPLATES_FOLDER}/{role}.jinja": text
        for role, text in named.items()
        if is_file_name(role)
    }


def _load_with_transformers(folder: Path, trust_remote_code: bool) -> Any:
    """Return the tokenizer that transformers loads, else that of its general class, else an error."""
    import transformers

    for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        try:
            loaded = kind.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
            loaded(list(_SAMPLES))  # a class can need tokens that the file lacks
            return loaded
        except Exception as error:  # noqa: BLE001  # a tokenizer's own code can raise any error
            failure = error
    return failure


def _adopt_loaded_tokenizer(folder: Path, output: Path, trust_remote_code: bool) -> tuple[TokenizerOrigin, list[str]]:
    """Compare tokenizer.json with the tokenizer that transformers loads, which may have more tokens or other flags.

    If they differ, write the latter into `output`. Returns (SourceTokens.made, notices for the user). Raises
    TokenizerError if they differ still, because code outside tokenizer.json changes texts or tokens.
    """
    loaded, file = _load_with_transformers(folder, trust_remote_code), output / "tokenizer.json"
    if isinstance(loaded, Exception):
        reason = one_line(loaded)
        return "copied", [f"transformers cannot load the tokenizer ({reason}), so only tokenizer.json was read"]
    difference = tokenizer_difference(loaded, file)
    if difference is None:
        return "compared", []
    if hasattr(loaded, "backend_tokenizer"):
        loaded.backend_tokenizer.save(str(file))
    if (remaining := tokenizer_difference(loaded, file)) is not None:
        raise TokenizerError(
            f"tokenizer.json cannot express the tokenizer that transformers loads from {folder} ({remaining}); give a "
            "folder whose tokenizer.json is complete with --tokenizer."
        )
    return "adopted", [f"tokenizer.json was written as transformers loads it: by the file alone, {difference}"]


def tokenizer_difference(loaded: Any, file: Path) -> str | None:
    """Describe the first text or tokens that a tokenizer.json converts differently; None if all agree.

    loaded: a tokenizer of transformers. Each of its added tokens is compared, alone and between words.
    """
    written = Tokenizer.from_file(str(file))
    written.no_truncation()
    written.no_padding()
    added = {number: str(entry) for number, entry in loaded.added_tokens_decoder.items()}
    added |= {number: entry.content for number, entry in written.get_added_tokens_decoder().items()}
    texts = [*_SAMPLES, *(text for token in added.values() for text in (f"of{token}words", f"of {token} words"))]
    encoded = []
    for special in (True, False):
        encoded = loaded(texts, add_special_tokens=special)["input_ids"]
        found = [each.ids for each in written.encode_batch(texts, add_special_tokens=special)]
        for text, expected, ids in zip(texts, encoded, found, strict=True):
            if list(expected) != ids:
                return f"{text!r} becomes {ids[:8]} instead of {list(expected)[:8]}"
    for ids in [*encoded, *([number] for number in added)]:
        for skip in (True, False):
            # Spaces before punctuation stay: a text that is decoded token by token cannot lose them later.
            expected = loaded.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            text = written.decode(ids, skip_special_tokens=skip)
            if text != expected:
                return f"{list(ids)[:8]} becomes {text!r} instead of {expected!r}"
    return None


def tokens_beyond_notices(output: Path, size: int) -> list[str]:
    """Return a notice if the written tokenizer has ids that a table of `size` rows lacks."""
    vocabulary = Tokenizer.from_file(str(output / "tokenizer.json")).get_vocab(with_added_tokens=True)
    beyond = sorted((number, text) for text, number in vocabulary.items() if number >= size)
    if not beyond:
        return []
    number, text = beyond[0]
    return [
        f"the tokenizer has {len(beyond)} tokens that the model's table of {size} rows lacks (first: {text!r}, id "
        f"{number}), so prompts with them are refused"
    ]


_MESSAGES = [{"role": "user", "content": "How warm is it in Oslo?"}]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def template_notices(folder: Path, written: ModelFolder[Any], *, trust_remote_code: bool = False) -> list[str]:
    """Compare chats that the export renders, with tools and without, with those of transformers.

    Returns a notice for the user for each difference.
    """
    if not _template_files(written.path):
        return []
    template = load_chat_template(written, RuntimeTokenizer(written))
    loaded = _load_with_transformers(folder, trust_remote_code)
    if template is None or isinstance(loaded, Exception):
        return []
    if not loaded.chat_template:
        loaded.chat_template = template.source  # a processor's
    notices = []
    for what, tools in (("a chat", None), ("a chat with tools", _TOOLS)):
        expected = _rendered(partial(loaded.apply_chat_template, _MESSAGES, tools=tools, **_AS_TEXT))
        found = _rendered(partial(template.render, _MESSAGES, tools=tools))
        if found != expected:
            notices.append(f"{what} is rendered as {found!r:.300}, but by transformers as {expected!r:.300}")
    return notices


_AS_TEXT = {"tokenize": False, "add_generation_prompt": True}


def _rendered(render: Callable[[], str]) -> str:
    """Return the text of a chat; `(refused)` if the template refuses it."""
    try:
        return render()
    except Exception:  # noqa: BLE001  # untrusted code
        return "(refused)"


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
