"""What commands write, killed before each of their file operations.

    python -m tests.attacks.kill_writers CASE MODEL FOLDER SHARE

CASE: one of CASES. MODEL: an exported folder, or the source of an export. SHARE: 1 for all operations, 3 for every
third and the last ones.

An audit hook counts what Python opens, renames, creates and removes beside the target, and kills the process. Children
are forked, so that libraries are loaded once. Prints JSON: {"operations": count, "wrong": complaints}.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.engine.test_session_file import FORM, TOKENS, states_of
from topw_deploy.engine.session_file import write_session
from topw_deploy.export import export_model, write
from topw_deploy.export.sampler_only import export_sampler
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.triton.repository import write_repository
from topw_deploy.web import write_site

_EVENTS = frozenset({
    "open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink", "os.chmod", "os.truncate",
    "shutil.rmtree", "shutil.move", "ctypes.dlsym",
})  # fmt: skip
_LAST = 8  # operations, with those that put the target in place
State = dict[str, bytes] | bytes | None


def _export(model: Path, target: Path, version: int) -> object:
    write.EXTERNAL_ABOVE = 10_000  # writes a data file
    return export_model(model, target, verify=False, with_mass=version == 1, overwrite=target.exists())


def _sampler(_model: Path, target: Path, version: int) -> object:
    options = asdict(TopWOptions(metric="uniform"))
    return export_sampler(None, target, vocab_size=300 + version, **options, verify=False, overwrite=target.exists())


Write = Callable[[Path, Path, int], object]
"""(model, target, which of two versions)"""
WRITERS: dict[str, Write] = {
    "export": _export,
    "web": lambda model, target, version: write_site(model, target, title=f"{version}", overwrite=target.exists()),
    "sampler": _sampler,
    "session": lambda _model, target, version: write_session(target, FORM, TOKENS, states_of(5, version)),
    "triton": lambda model, target, _version: write_repository(model, target.parent, name=target.name),
}
CASES = [f"{name}-{how}" for name in WRITERS for how in ("new", "replace") if (name, how) != ("triton", "replace")]
MOST_HIDDEN = 2  # files that a killed export leaves, which the next one removes; others may leave any


def state(path: Path) -> State:
    if not path.is_dir():
        return path.read_bytes() if path.exists() else None
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def watch(parent: Path, tell: Callable[[int], object]) -> None:
    """Call `tell` before each operation in `parent`, with its number."""
    count, prefix = [0], os.fsencode(parent)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS:
            return
        exchanges = event == "ctypes.dlsym" and arguments[1] == "renameat2"
        paths = [os.fsencode(each) for each in arguments if isinstance(each, (str, bytes, os.PathLike))]
        if exchanges or (event != "ctypes.dlsym" and any(path.startswith(prefix) for path in paths)):
            tell(count[0])
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


def main(case: str, model: Path, folder: Path, share: int) -> None:
    name, how = case.split("-")
    write_to, replaces, checks_hidden = WRITERS[name], how == "replace", name == "export"
    work = folder / "work"
    target = work / ("repository/out" if name == "triton" else "out")

    def prepare() -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        if replaces:
            write_to(model, target, 1)

    prepare()
    old = state(target)
    count = folder / "count"

    def counted() -> None:
        numbers: list[int] = []
        watch(work, numbers.append)
        write_to(model, target, 0)
        count.write_text(str(len(numbers)))

    assert in_child(counted) == 0
    new, operations, wrong = state(target), int(count.read_text()), []
    for stop in sorted({*range(0, operations, share), *range(max(0, operations - _LAST), operations)}):
        prepare()

        def killed(stop: int = stop) -> None:
            watch(work, lambda number: number == stop and os.kill(os.getpid(), signal.SIGKILL))
            write_to(model, target, 0)

        if not os.WIFSIGNALED(in_child(killed)):
            wrong.append(f"{stop}: it was not killed")
        found = state(target)
        if found not in (old, new):
            wrong.append(f"{stop}: neither the old state nor the new one")
        beside = {path.name for path in work.iterdir() if not path.name.startswith(".")}
        if target.parent != work and target.parent.exists():
            beside |= {path.name for path in target.parent.iterdir()}
        if beside - {target.name, target.parent.name}:
            wrong.append(f"{stop}: left {sorted(beside)}")
        if checks_hidden and len(list(work.glob(".*"))) > MOST_HIDDEN:
            wrong.append(f"{stop}: left {os.listdir(work)}")
        if found == new and not replaces:
            continue
        if in_child(lambda: write_to(model, target, 0)) or state(target) != new:
            wrong.append(f"{stop}: the next one fails")
        elif checks_hidden and list(work.glob(".*")):
            wrong.append(f"{stop}: the next one leaves {os.listdir(work)}")
    sys.stdout.write(json.dumps({"operations": operations, "wrong": wrong}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
