"""Errors for the user. Each message names the value, the bound and the next step."""

from __future__ import annotations


class TopWError(Exception):
    """Base of the errors that this package raises on purpose. The command line prints the message and exits with 1.

    parameters: names of Python parameters in the message, which the command line replaces by its options.
    """

    def __init__(self, message: str = "", *parameters: str) -> None:
        super().__init__(message)
        self.parameters = parameters


class ParameterError(TopWError, ValueError):
    """A parameter is unknown, has the wrong type or is out of range. The exit code is 2 if the command line set it."""


class GrammarError(ParameterError):
    """A request's grammar is invalid, matches nothing or is too complex.

    line, column: the place in the text of the schema, expression or grammar, from 1; None if the compiler states none.
    """

    def __init__(self, message: str, *parameters: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message, *parameters)
        self.line, self.column = line, column


class SourceError(TopWError):
    """The source model is missing, gated, unreadable, or not a model."""


class UnsupportedModelError(TopWError):
    """The exporter does not support this model."""


class ExportError(TopWError):
    """Writing failed. No folder is left that would load."""


class VerificationError(TopWError):
    """The exported graph and the reference disagree."""


class ManifestError(TopWError):
    """The manifest is missing, malformed, too new, or does not match its files."""


class TokenizerError(TopWError):
    """The tokenizer or chat template is missing or unusable."""


class PromptError(TopWError, ValueError):
    """The prompt cannot be read, is longer than the context, or is empty for a model without a BOS token."""


class ProviderError(TopWError):
    """The requested execution provider cannot run here."""


class UnknownProviderError(ProviderError, ParameterError):
    """The name is not that of an execution provider."""


class PluginError(TopWError):
    """A native library cannot be built or used here."""


class TensorRTError(TopWError):
    """A TensorRT engine cannot be built, or does not fit this machine or folder."""


class GenerationError(TopWError):
    """Generation failed, for example for lack of cache memory."""


class QueueFullError(GenerationError):
    """The batching engine's queue has no room for the request."""


class SessionFileError(GenerationError):
    """The file of a saved session cannot be read or written, is damaged, or belongs to another model."""


class LogitsError(GenerationError):
    """The logits of a row contain NaN or +infinity, or no finite value after edits. The message names the row."""


class MissingPackageError(TopWError, ModuleNotFoundError):
    """A package is missing. The message states the command that installs it.

    name: the missing module, as in ImportError.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class BenchmarkError(TopWError):
    """A program in a comparison is missing, has ended, or gives other results than it must."""


def one_line(error: BaseException, most: int = 300) -> str:
    """Return the message of `error` in one line of at most `most` characters. An empty message gives the class name."""
    return " ".join(str(error).split())[:most] or type(error).__name__
