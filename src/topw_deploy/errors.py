"""User-facing errors. Messages name value, bound and next step."""

from __future__ import annotations


class TopWError(Exception):
    """Base of intentional errors; the command line prints them and exits with 1.

    parameters: Python parameters in the message, which the command line replaces by options.
    """

    def __init__(self, message: str = "", *parameters: str) -> None:
        super().__init__(message)
        self.parameters = parameters


class ParameterError(TopWError, ValueError):
    """Unknown, mistyped or out-of-range parameter; the command line exits with 2 if the user set it there."""


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
    """Missing or unusable tokenizer or chat template."""


class PromptError(TopWError, ValueError):
    """The prompt is empty without BOS token, or exceeds the context."""


class ProviderError(TopWError):
    """The requested execution provider would not run."""


class UnknownProviderError(ProviderError, ParameterError):
    """Unknown execution provider name."""


class PluginError(TopWError):
    """A native library cannot be built or used here."""


class EngineError(TopWError):
    """A TensorRT engine cannot be built, or does not fit this machine or folder."""


class GenerationError(TopWError):
    """Generation failed: invalid logits (names row and step), no cache memory."""


class LogitsError(GenerationError):
    """Logits contain NaN or +infinity, or nothing finite after edits."""


class MissingPackageError(TopWError, ModuleNotFoundError):
    """Packages are missing; the message has the install command.

    name: missing module, as in ImportError.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class BenchmarkError(TopWError):
    """A side is missing, died, or answers differently."""


def one_line(error: BaseException, most: int = 300) -> str:
    """`error`'s message as one line, at most `most` characters, or its class name."""
    return " ".join(str(error).split())[:most] or type(error).__name__
