"""Exports killed before each of their file operations.

    python -m tests.attacks.kill_export SOURCE FOLDER SITUATION SHARE

SITUATION: new (OUT does not exist) or replace (OUT is an earlier export).
SHARE: 1 for all operations, 10 for every tenth, and for those that put the folder in place.

An audit hook counts what Python opens, renames, creates and removes beside OUT, and kills the process. Children are
forked, so that libraries are loaded once. Prints JSON: {"operations": count, "killed": count, "wrong": complaints}.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topw_deploy.errors import ManifestError, TopWError
from topw_deploy.export import export_model, write
from topw_deploy.manifest import MANIFEST_NAME, check_hashes, load_manifest

_EVENTS = frozenset({
    "open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink", "os.chmod", "os.truncate",
    "shutil.rmtree", "shutil.move", "ctypes.dlsym",
})  # fmt: skip


def main(source: str, folder: Path, situation: str, share: int) -> None:
    write.EXTERNAL_ABOVE = 10_000  # writes a data file
    expected = folder / "expected"
    assert run_export(source, expected / "out", finished=True) == 0
    old, new = {}, read_contents(expected / "out")
    if situation == "replace":
        assert run_export(source, folder / "old", finished=True, with_mass=True) == 0
        old = read_contents(folder / "old")
        assert old != new
    work = folder / "work"
    operations, decisive = count_operations(source, prepare_output(work, situation, folder / "old"), folder / "count")
    wrong, killed = [], 0
    for number in sorted({*range(0, operations, share), *decisive}):
        out = prepare_output(work, situation, folder / "old")
        status = run_export(source, out, overwrite=situation == "replace", kill_at=number)
        if not os.WIFSIGNALED(status):
            wrong.append(f"{number}: ended with {status}")
            continue
        killed += 1
        for complaint in check(source, out, old, new):
            wrong.append(f"{situation}, killed before operation {number}: {complaint}")
    sys.stdout.write(json.dumps({"operations": operations, "killed": killed, "wrong": wrong}))


def prepare_output(work: Path, situation: str, old: Path) -> Path:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    if situation == "replace":
        shutil.copytree(old, work / "out")
    return work / "out"


def check(source: str, out: Path, old: dict[str, bytes], new: dict[str, bytes]) -> list[str]:
    """What is wrong after a kill, and after the export that follows."""
    complaints = []
    hidden = [path.name for path in out.parent.iterdir() if path != out]
    if any(not name.startswith((".out.topw-partial-", ".out.topw-lock")) for name in hidden) or len(hidden) > 2:
        complaints.append(f"left {hidden}")
    found = read_contents(out) if out.exists() else {}
    complete = MANIFEST_NAME in found
    if complete and found not in (old, new):
        complaints.append("the folder is neither the old export nor the new one")
    if old and not complete:
        complaints.append("the old export is gone")
    try:
        check_hashes(out, load_manifest(out))
        if not complete:
            complaints.append("a folder without its manifest loads")
    except ManifestError as error:
        if complete:
            complaints.append(f"the folder does not load: {error}")
    if status := run_export(source, out, overwrite=complete, finished=True):
        complaints.append(f"the next export ends with {status}")
    elif read_contents(out) != new:
        complaints.append("the next export has other bytes")
    if left := [path.name for path in out.parent.iterdir() if path.name != "out"]:
        complaints.append(f"the next export leaves {left}")
    return complaints


def read_contents(folder: Path) -> dict[str, bytes]:
    """Files by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_export(source: str, out: Path, finished: bool = False, kill_at: int | None = None, **settings: Any) -> int:
    """Export in a child. Returns its wait status. finished: print the error of a failure."""

    def export() -> None:
        if kill_at is not None:
            watch(out.parent, lambda number, _: number == kill_at and os.kill(os.getpid(), signal.SIGKILL))
        try:
            export_model(source, out, verify=False, **settings)
        except TopWError as error:
            if finished:
                sys.stderr.write(f"{error}\n")
            os._exit(1)

    return in_child(export)


def count_operations(source: str, out: Path, report: Path) -> tuple[int, list[int]]:
    """Count the file operations of an export. Returns (their number, decisive).

    decisive: the number of the first operation that puts something into OUT, of the last one, and of the next after it.
    """
    decisive: list[bool] = []

    def export() -> None:
        watch(out.parent, lambda number, puts: decisive.append(puts))
        export_model(source, out, verify=False, overwrite=out.exists())
        report.write_text(json.dumps(list(decisive)))

    assert in_child(export) == 0
    seen = json.loads(report.read_text())
    places = [number for number, puts in enumerate(seen) if puts]
    return len(seen), [places[0], places[-1], places[-1] + 1]


def watch(parent: Path, tell: Callable[[int, bool], object]) -> None:
    """Call `tell` before each operation in `parent`, with its number and whether it puts something into OUT."""
    count, prefix, target = [0], os.fsencode(parent), os.fsencode(parent / "out")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS:
            return
        exchanges = event == "ctypes.dlsym" and arguments[1] == "renameat2"
        paths = [os.fsencode(each) for each in arguments if isinstance(each, (str, bytes, os.PathLike))]
        if not exchanges and (event == "ctypes.dlsym" or not any(path.startswith(prefix) for path in paths)):
            return
        tell(count[0], exchanges or (event == "os.rename" and paths[-1].startswith(target)))
        count[0] += 1

    sys.addaudithook(hook)


def in_child(run: Callable[[], object]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            run()
            os._exit(0)
        os._exit(2)
    return os.waitpid(child, 0)[1]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
