"""Find the library of the native sampler operator."""

from __future__ import annotations

from contextlib import suppress

import onnxruntime as ort

from topw_deploy.plugins import library
from topw_deploy.runtime.ort import providers

_LIBRARY_KINDS: dict[str, library.Kind] = {providers.CPU: "cpu", providers.CUDA: "cuda"}


def operator_library(
    provider: str, table_form: str, options: ort.SessionOptions | None = None, device: int = 0
) -> tuple[library.Library | None, str]:
    """Find the library of the native operator for a provider.

    provider: its full name.
    table_form: the table form in the manifest.
    options: session options, which may already have operators.
    device: the number of the GPU.

    Returns (library or None, a clause that says why there is none).
    """
    kind = _LIBRARY_KINDS.get(provider)
    if kind is None:
        return None, f"the native sampler supports cpu and cuda, but the provider is {providers.short_name(provider)}"
    registered: library.Kind | None = None
    if options is not None:
        with suppress(Exception):  # missing entry
            registered = "cuda" if options.get_session_config_entry("topw.registered") == "cuda" else "cpu"
    if kind == "cuda" and registered == "cpu":
        return None, "the session options already have the CPU's operator and cannot take the GPU's; give new ones"
    found, why = library.load_selected(registered or kind)
    if isinstance(found, library.CudaLibrary) and kind == "cuda":
        why = found.missing_code(library.query_driver().devices[device : device + 1])
    if found is None or why:
        return None, why
    if not found.supports(table_form):
        return None, f"the native sampler does not support the table form {table_form}"
    return found, ""
