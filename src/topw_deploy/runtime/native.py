"""Who answers the sampler's node of a session: the native operator where it opens, else the function in the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnxruntime as ort

from topw_deploy.errors import ParameterError, ProviderError
from topw_deploy.plugins import shared_library as library
from topw_deploy.runtime import providers
from topw_deploy.runtime.face import Sampler

SAMPLERS = ("auto", "native", "graph")


@dataclass(frozen=True)
class Opened:
    """A session and what samples in it: `native`, or `graph` (the model's function) with the reason why."""

    raw: ort.InferenceSession
    sampler: Sampler
    why_graph: str = ""


def check_choice(sampler: str) -> None:
    """Raises ParameterError unless `sampler` is one of SAMPLERS."""
    if sampler not in SAMPLERS:
        raise ParameterError(f"sampler is {sampler!r}, but must be one of {', '.join(SAMPLERS)}.")


def operator_library(provider: str, table_form: str) -> tuple[library.Library | None, str]:
    """The library to open a session on `provider` with, for a model whose table is looked up in `table_form`; or
    None and why not, as a clause."""
    if provider != providers.CPU:
        return None, f"the native sampler is for the CPU, and the provider is {providers.short_name(provider)}"
    path = library.library_path()
    if path is None:
        return None, library.why_absent()
    try:
        found = library.load(path)
    except OSError as error:
        named = library.variable_naming(path)
        which = f"the native library that {named} names" if named else "the native library"
        return None, f"{which} does not load ({one_line(error)})"
    if not found.knows(table_form):
        return None, f"the native sampler does not read tables by {table_form}"
    return found, ""


def open_session(
    new_session: Callable[[], ort.InferenceSession],
    options: ort.SessionOptions,
    *,
    provider: str,
    table_form: str,
    sampler: str,
) -> Opened:
    """Open a session with `new_session`, which takes `options`, natively where `sampler` allows and it succeeds.

    onnxruntime prefers a registered operator to a function of the same name, but does not go back to the function
    where the operator refuses: the session does not open. It is then opened again without.

    Raises what `new_session` does, and ProviderError where `sampler` is "native" and it cannot be.
    """
    if sampler == "graph":
        why = "sampler='graph' asks for it"
    else:
        found, why = operator_library(provider, table_form)
        if found is not None:
            before = found.kernels
            try:
                options.register_custom_ops_library(str(found.path))
                raw = new_session()
            except Exception as error:  # noqa: BLE001  # onnxruntime raises a dozen unrelated classes here
                why = f"onnxruntime does not open it with the native sampler ({one_line(error)})"
            else:
                if found.kernels > before:
                    return Opened(raw, "native")
                why = "the graph has no node for the native sampler"
                del raw
    with library.hidden():
        raw = new_session()
    if sampler == "native":
        raise ProviderError(f"sampler='native' cannot be had: {why}; see `topw doctor`, or use sampler='auto'.")
    return Opened(raw, "graph", why)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
