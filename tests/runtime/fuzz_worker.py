"""Opens a folder with one mutated file at a time, and generates.

A separate process contains crashes. Prints JSON: {"wrong": errors other than TopWError, "loaded": number of opened
folders}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import resource
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.mutations import VALUES, mutations
from topw_deploy.errors import TopWError
from topw_deploy.manifest import MANIFEST_NAME, manifest_from_json
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort import graph_session

MEMORY = 8 << 30  # bytes, for the same MemoryError on all machines
HANG = 240  # seconds per folder
_VALUES = tuple(value for value in VALUES if len(value) < 10_000 and "\\x" not in value and "/" not in value)
_NOT_RUN = ("source", "libraries", "verification", "format_version")


def main(folder: Path, name: str, within: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    original = (folder / MANIFEST_NAME).read_text("utf-8")
    wrong, loaded = [], 0
    if name != MANIFEST_NAME:
        _open_the_graph_once()
    for what, put in (
        _manifests(folder, original, within) if name == MANIFEST_NAME else _side_files(folder, name, original)
    ):
        faulthandler.dump_traceback_later(HANG, exit=True)
        put()
        try:
            with TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1) as model:
                loaded += 1
                _use(model)
        except TopWError:
            pass
        except BaseException as error:  # noqa: BLE001  # Rust panics are not Exceptions
            wrong.append(f"{what}: {error!r:.300}")
    sys.stdout.write(json.dumps({"wrong": wrong, "loaded": loaded}) + "\n")


def _open_the_graph_once() -> None:
    """Keep one session: the graph does not depend on the fuzzed files, and opening it takes most of the time."""
    new, opened = graph_session._new_session, list[Any]()

    def session(*arguments: Any) -> Any:
        if not opened:
            opened.append(new(*arguments))
        return opened[0]

    graph_session._new_session = session


def _use(model: TopWModel) -> None:
    model.generate("a", max_new_tokens=2, seed=1)
    for verb in (
        lambda: model.generate([3, 4], max_new_tokens=10**14, seed=1),
        lambda: model.generate("", max_new_tokens=1, seed=1),
        lambda: model.chat([{"role": "user", "content": "x"}], max_new_tokens=1, seed=1),
    ):
        with contextlib.suppress(TopWError):
            verb()


def _manifests(folder: Path, original: str, within: str) -> Iterator[tuple[str, Any]]:
    """Valid JSON changed in one place whose name begins with `within`."""
    seen = {manifest_from_json(original).to_json()}
    for what, text in mutations(json.loads(original), _VALUES):
        if what.startswith(_NOT_RUN) or not what.startswith(within):
            continue
        try:
            says = manifest_from_json(text).to_json()
        except TopWError:
            continue
        if says not in seen:
            seen.add(says)
            yield what, lambda text=text: (folder / MANIFEST_NAME).write_text(text, "utf-8")


def _side_files(folder: Path, name: str, original: str) -> Iterator[tuple[str, Any]]:
    for what, text in mutations(json.loads((folder / name).read_text("utf-8"))):

        def put(data: bytes = text.encode()) -> None:
            (folder / name).write_bytes(data)
            manifest = json.loads(original)
            manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            (folder / MANIFEST_NAME).write_text(json.dumps(manifest), "utf-8")

        yield what, put


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
