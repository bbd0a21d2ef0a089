"""Every error a user can meet. Each message is one sentence: the value, the bound, the next step."""

from __future__ import annotations


class TopWError(Exception):
    """Base of all errors this package raises on purpose; the command line prints it and exits with 1.

    parameters: names of Python parameters that the message holds. The command line puts its own options in their place.
    """

    def __init__(self, message: str = "", *parameters: str) -> None:
        super().__init__(message)
        self.parameters = parameters


class ParameterError(TopWError, ValueError):
    """A Top-W or generation parameter is unknown, of the wrong type or out of range.

    The command line exits with 2 where it was given there.
    """


class SourceError(TopWError):
    """The model to export cannot be had: missing, gated, unreadable, or not a model."""


class UnsupportedModelError(TopWError):
    """The model is there, but this exporter cannot serve it; the message names what is missing."""


class ExportError(TopWError):
    """Writing the exported folder failed; nothing that loads was left behind."""


class VerificationError(TopWError):
    """The exported graph disagrees with its reference."""


class ManifestError(TopWError):
    """The folder's manifest is missing, malformed, too new, or does not fit the files beside it."""


class TokenizerError(TopWError):
    """The tokenizer or chat template is missing or cannot be used."""


class PromptError(TopWError, ValueError):
    """The prompt cannot be run: empty without a BOS token, or longer than the context."""


class ProviderError(TopWError):
    """The execution provider asked for is not the one that would run."""


class UnknownProviderError(ProviderError, ParameterError):
    """No execution provider has this name."""


class PluginError(TopWError):
    """A native library cannot be built, or does not fit this machine."""


class EngineError(TopWError):
    """A TensorRT engine cannot be built, or the one that is there does not fit this machine or folder."""


class GenerationError(TopWError):
    """A generation cannot go on: a row's logits are invalid (names row and step), no memory for the cache."""


class LogitsError(GenerationError):
    """A row's logits hold NaN or +infinity, or nothing finite after the edits."""


class MissingPackageError(TopWError, ModuleNotFoundError):
    """Packages that this needs are not installed; the message names them and the command that installs them.

    name: the module that failed, as in ImportError.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class BenchmarkError(TopWError):
    """A measurement cannot be taken: a side is absent though named, died, or does not answer as the others do."""


def one_line(error: BaseException, most: int = 300) -> str:
    """The message of another library's `error` as one line of at most `most` characters, or its class's name."""
    return " ".join(str(error).split())[:most] or type(error).__name__
