"""Each model is traced once in a test run.

Tracing takes most of a small export's time and depends on a model's structure, not on its weights. A repeated model
gets the trace that the first one left, loaded as a resumed export loads its own. `tests/export/trace` tests tracing
itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from topw_deploy.export.resume.journal import Journal
from topw_deploy.export.trace import trace as real
from topw_deploy.export.trace.trace import TracedDecoder

folder: Path | None = None
"""Where traces are kept; None: every model is traced."""
_STAGE = "traced graph"
_LIBRARIES = ("torch.", "transformers.")


def trace(model: PreTrainedModel) -> TracedDecoder:
    """`topw_deploy.export.trace.trace.trace`, or what it returned for the same structure."""
    stamp = structure_of(model)
    if folder is None or stamp is None:
        return real.trace(model)
    kept = Journal(folder / stamp).find(_STAGE, stamp, file=str, num_layers=int)
    if kept is not None:
        return real.load_trace(kept["file"], kept["num_layers"], model)
    traced = real.trace(model)
    scratch = Path(tempfile.mkdtemp(dir=folder))
    save = partial(real.save_trace, traced, model)
    Journal(scratch).record_file(_STAGE, stamp, "trace.onnx", save, num_layers=traced.num_layers)
    with contextlib.suppress(OSError):  # another worker was first
        scratch.rename(folder / stamp)
    return traced


def structure_of(model: PreTrainedModel) -> str | None:
    """A digest of all that a trace depends on; None if the model runs code that is not its library's."""
    modules = dict(model.named_modules())
    if any("forward" in vars(m) or not type(m).__module__.startswith(_LIBRARIES) for m in modules.values()):
        return None
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    digest = hashlib.sha256()
    for part in (
        json.dumps({**model.config.to_dict(), "_name_or_path": None}, sort_keys=True, default=str),
        [(name, type(module).__qualname__) for name, module in modules.items()],
        [(name, first.setdefault(id(p), name), tuple(p.shape), str(p.dtype)) for name, p in parameters.items()],
        [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()],
    ):
        digest.update(repr(part).encode())
    for _, buffer in model.named_buffers():  # frequencies, biases of experts: constants of the graph
        digest.update(buffer.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
