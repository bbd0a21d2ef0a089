"""The folder's `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from topw_deploy.errors import PromptError, TokenizerError, one_line
from topw_deploy.manifest import ModelFolder
from topw_deploy.runtime.text import IncrementalDecoder, TokenBytes

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Converts text to token ids and back.

    special_tokens: role (`bos_token`, `eos_token`, ...) -> its text in the configuration.

    Raises TokenizerError if `tokenizer.json` is missing or unusable.
    """

    def __init__(self, folder: ModelFolder[Any]) -> None:
        if not folder.has(TOKENIZER_FILE):
            raise TokenizerError(
                f"{folder.path} has no {TOKENIZER_FILE}; export the model again from a folder with a tokenizer."
            )
        self._file = folder.path / TOKENIZER_FILE
        text = folder.read_text(TOKENIZER_FILE)
        try:
            self._raw = RustTokenizer.from_str(text)
        except BaseException as error:  # noqa: BLE001  # the library raises a bare Exception, or panics in Rust
            raise self._as_tokenizer_error(error, "read") from None
        # Truncation and padding would silently change prompts.
        self._raw.no_truncation()
        self._raw.no_padding()
        self._bytes = {skip: TokenBytes(self._raw, skip) for skip in (False, True)}
        self.config = folder.read_json(CONFIG_FILE)
        self.special_tokens = _special_tokens({**folder.read_json(SPECIAL_TOKENS_FILE), **self.config})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Convert text to token ids. Raises PromptError for a lone surrogate, which UTF-8 cannot encode."""
        try:
            ids: list[int] = self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise PromptError(
                "the prompt has half of a surrogate pair, so it is not valid Unicode; repair it."
            ) from None
        except BaseException as error:  # noqa: BLE001
            raise self._as_tokenizer_error(error, "used") from None
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Convert token ids to text; ids without a token give no text."""
        try:
            text: str = self._raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:  # noqa: BLE001
            raise self._as_tokenizer_error(error, "used") from None
        return text

    def text_of(self, token: int) -> str:
        """The text of a token alone, with U+FFFD for a part of a character; "" for an unknown id."""
        return self.decode([token], skip_special_tokens=False)

    def text_decoder(self, prompt: Sequence[int], skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder of the tokens after `prompt`."""
        of = self._bytes[skip_special_tokens]

        def decode(ids: Sequence[int]) -> str:
            return self.decode(ids, skip_special_tokens)

        return IncrementalDecoder(of.join if of.can_join else decode, prompt, of)

    def token_bytes(self, size: int) -> tuple[list[bytes], list[int]]:
        """The bytes of the tokens below `size`.

        Returns (for each token the UTF-8 text that it gives after other text, ids of special tokens). The text of a
        special token is its name; an id without text has b"".
        """
        special = {
            token: entry.content for token, entry in self._raw.get_added_tokens_decoder().items() if entry.special
        }
        of = self._bytes[False]
        found = [special[token].encode() if token in special else of(token) for token in range(size)]
        whole = [token for token, data in enumerate(found) if data is None]
        for token, text in zip(whole, self._decode_within_text(whole), strict=True):
            found[token] = text.encode()
        return [data or b"" for data in found], [token for token in special if token < size]

    def _decode_within_text(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token behind a word: at the start of a text, a token may lose its space."""
        before = next((token for token in tokens if self.decode([token], False).isalpha()), None)
        start = [] if before is None else [before]
        context = self.decode(start, False)
        return [self.decode([*start, token], False).removeprefix(context) for token in tokens]

    def _as_tokenizer_error(self, error: BaseException, done: str) -> BaseException:
        """Convert an error of the library. Its panics are not of the class Exception."""
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            return error  # an interrupt, to be raised as it is
        return TokenizerError(f"{self._file} cannot be {done} ({one_line(error, 200)}); export the model again.")

    def token_id(self, token: str | None) -> int | None:
        """The id of a token given by its text; None for an unknown token."""
        try:
            return None if token is None else self._raw.token_to_id(token)
        except (TypeError, UnicodeEncodeError):  # lone surrogate
            return None

    @cached_property
    def special_ids(self) -> dict[int, str]:
        """The special tokens, by id."""
        added = self._raw.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items() if entry.special}

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts of the added tokens, special or not."""
        return tuple(entry.content for entry in self._raw.get_added_tokens_decoder().values())

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("eos_token"))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        return int(self._raw.get_vocab_size(with_added_tokens=True))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by role. The files hold strings or objects with `content`."""
    found = {}
    for role in _ROLES:
        value = config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[role] = text
    return found
