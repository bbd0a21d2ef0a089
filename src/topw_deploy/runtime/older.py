"""What onnxruntime before 1.24 does differently. JetPack 6 has 1.23 (docs/guide/edge.md).

Graphs that it would not know, or compute wrongly, are refused before they are opened. It does not report where nodes
are either: that is read from the profile of one run.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime as ort

from topw_deploy.errors import ManifestError
from topw_deploy.files import mapped
from topw_deploy.runtime.folder import ModelFolder

_MOST_OPSET = 23
# An attribute of a node in ONNX's encoding, with another value than -1, which stands for no window.
_WINDOW = re.compile(rb"local_window_size\x18(?!\xff{9}\x01)")
_TIMED = "_kernel_time"  # what a profile appends to a node's name


def is_older() -> bool:
    """Whether this onnxruntime is older than 1.24."""
    return tuple(int(part) for part in ort.__version__.split(".")[:2]) < (1, 24)


def check_graph(folder: ModelFolder) -> None:
    """Raises ManifestError for a graph that this onnxruntime does not know or computes wrongly."""
    if not is_older():
        return
    opset = folder.manifest.opset.get("", 0)
    if opset > _MOST_OPSET:
        raise ManifestError(
            f"{folder.path} has operators of opset {opset}, but onnxruntime {ort.__version__} knows them up to opset "
            f"{_MOST_OPSET}; export without --target tensorrt, or install onnxruntime 1.26 or newer."
        )
    with mapped(folder.model) as graph:
        found = _WINDOW.search(graph)
    if found:
        raise ManifestError(
            f"{folder.path} has attention with a sliding window in GroupQueryAttention, which onnxruntime "
            f"{ort.__version__} makes a token too long; export with --kv concat, or install onnxruntime 1.24 or newer."
        )


class Profile:
    """Where the nodes of a session are, as one run of it shows. To be made before the session is opened with `options`,
    and asked once."""

    def __init__(self, options: ort.SessionOptions) -> None:
        folder = tempfile.mkdtemp(prefix="topw-")
        self._discard = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._options = options
        self._before = options.enable_profiling, options.profile_file_prefix
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "run")

    def restore(self) -> None:
        """Leave `options` as they were: they are the caller's."""
        self._options.enable_profiling, self._options.profile_file_prefix = self._before

    def nodes(self, raw: ort.InferenceSession) -> list[tuple[str, str, str]]:
        """(name, operator, provider) of every node of the graph itself that `raw` has run so far. Ends the profile."""
        events = json.loads(Path(raw.end_profiling()).read_text(encoding="utf-8"))
        self._discard()
        found = [event for event in events if event.get("args", {}).get("provider")]
        return list(dict.fromkeys(_node(event) for event in _outermost(found)))


def _outermost(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The events that do not lie within another one, as those of an If's branches do."""
    end = -1
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= end or event["ts"] + event["dur"] > end:
            end = event["ts"] + event["dur"]
            yield event


def _node(event: dict[str, Any]) -> tuple[str, str, str]:
    return event["name"].removesuffix(_TIMED), event["args"]["op_name"], event["args"]["provider"]
