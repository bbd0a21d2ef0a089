"""Errors for the user. Each message names the value, the bound and the next step."""

from __future__ import annotations


class TopWError(Exception):
    """Base of intentional errors; the command line prints them and exits with 1.

    parameters: Python parameters that the message names; the command line replaces them by its options.
    """

    def __init__(self, message: str = "", *parameters: str) -> None:
        super().__init__(message)
        self.parameters = parameters


class ParameterError(TopWError, ValueError):
    """A parameter is unknown, has the wrong type or is out of range; exit code 2 if set on the command line."""


class GrammarError(ParameterError):
    """A request's grammar is invalid, matches nothing or is too complex.

    line, column: where, from 1, if the compiler says so; in the schema's text, the expression or the grammar.
    """

    def __init__(self, message: str, *parameters: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message, *parameters)
        self.line, self.column = line, column


class SourceError(TopWError):
    """The source model is missing, gated, unreadable, or not a model."""


class UnsupportedModelError(TopWError):
    """The exporter does not support this model."""


class ExportError(TopWError):
    """Writing failed; nothing loadable is left."""


class VerificationError(TopWError):
    """Exported graph and reference disagree."""


class ManifestError(TopWError):
    """The manifest is missing, malformed, too new, or does not match its files."""


class TokenizerError(TopWError):
    """The tokenizer or chat template is missing or unusable."""


class PromptError(TopWError, ValueError):
    """The prompt is empty without BOS token, or exceeds the context."""


class ProviderError(TopWError):
    """The requested execution provider cannot run."""


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
    """The file of a saved session cannot be read or written, is damaged, or is another model's."""


class LogitsError(GenerationError):
    """Logits contain NaN or +infinity, or no finite value after edits; the message names the row."""


class MissingPackageError(TopWError, ModuleNotFoundError):
    """Packages are missing; the message has the install command.

    name: missing module, as in ImportError.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class BenchmarkError(TopWError):
    """A side of a comparison is missing, has died, or gives other results."""


def one_line(error: BaseException, most: int = 300) -> str:
    """`error`'s message as one line, at most `most` characters, or its class name."""
    return " ".join(str(error).split())[:most] or type(error).__name__
