"""The exported folder's tokenizer: `tokenizer.json` through the tokenizers library, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from topw_deploy.errors import PromptError, TokenizerError
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.text import IncrementalDecoder
from topw_deploy.runtime.token_bound import TokenBound, token_bound
from topw_deploy.runtime.token_bytes import TokenBytes

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Text <-> token ids. Raises TokenizerError when `tokenizer.json` is missing or unreadable, and where the library
    fails on what it says.

    special_tokens: the texts of bos_token, eos_token, ... as the folder's configuration names them.
    """

    def __init__(self, folder: ModelFolder) -> None:
        if not folder.has(TOKENIZER_FILE):
            raise TokenizerError(
                f"{folder.path} has no {TOKENIZER_FILE}; export the model again from a folder with a tokenizer."
            )
        self._file = folder.path / TOKENIZER_FILE
        try:
            self._raw = RustTokenizer.from_str(folder.read_text(TOKENIZER_FILE))
        except BaseException as error:  # noqa: BLE001  # the library raises bare Exception, and panics
            raise self._typed(error, "read") from None
        # Settings for training batches: left on, they would silently cut or pad a prompt.
        self._raw.no_truncation()
        self._raw.no_padding()
        self._bytes = {skip: TokenBytes(self._raw, skip) for skip in (False, True)}
        self.config = folder.read_json(CONFIG_FILE)
        self.special_tokens = _special_tokens({**folder.read_json(SPECIAL_TOKENS_FILE), **self.config})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; PromptError if it holds half a surrogate pair, which no UTF-8 can say."""
        try:
            ids: list[int] = self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise PromptError(
                "the prompt holds half a surrogate pair, so it is not valid Unicode; repair it."
            ) from None
        except BaseException as error:  # noqa: BLE001
            raise self._typed(error, "used") from None
        return ids

    @cached_property
    def bound(self) -> TokenBound:
        """How much text a token covers at most. Made when it is first asked for, in about 0.1 us for each token."""
        return token_bound(self._raw)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            text: str = self._raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:  # noqa: BLE001
            raise self._typed(error, "used") from None
        return text

    def follow(self, prompt: Sequence[int], skip_special_tokens: bool = True) -> IncrementalDecoder:
        """The decoder of the tokens that follow `prompt`."""

        def decode(ids: Sequence[int]) -> str:
            return self.decode(ids, skip_special_tokens)

        return IncrementalDecoder(decode, prompt, self._bytes[skip_special_tokens])

    def _typed(self, error: BaseException, done: str) -> BaseException:
        """A TokenizerError for a failure of the library, its panics included, which are no Exception."""
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            return error  # an interrupt
        reason = " ".join(str(error).split())[:200]
        return TokenizerError(f"{self._file} cannot be {done} ({reason}); export the model again.")

    def id_of(self, token: str | None) -> int | None:
        """The id of a token's text, None if there is no such token."""
        try:
            return None if token is None else self._raw.token_to_id(token)
        except (TypeError, UnicodeEncodeError):  # half a surrogate pair, which no token can hold
            return None

    @property
    def bos_token_id(self) -> int | None:
        return self.id_of(self.special_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        return self.id_of(self.special_tokens.get("eos_token"))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._raw.get_vocab_size(with_added_tokens=True))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by role: the files hold each as a string or as an object with `content`."""
    found = {}
    for role in _SPECIAL:
        value = config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[role] = text
    return found
