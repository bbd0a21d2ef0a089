"""What other commands write, killed before each of their file operations: see kill_export.py.

    python -m tests.attacks.kill_writers WRITER MODEL FOLDER SHARE

WRITER: one of WRITERS. MODEL: an exported folder. SHARE: 1 for all operations, 3 for every third and the last ones.
Prints JSON: {"operations": count, "wrong": complaints}.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.attacks.kill_export import in_child, read_contents, watch
from tests.engine.test_session_file import FORM, TOKENS, states_of
from topw_deploy.engine.session_file import write_session
from topw_deploy.export.sampler_only import export_sampler
from topw_deploy.sampling.parameters import TopWOptions
from topw_deploy.triton.repository import write_repository
from topw_deploy.web import write_site

_LAST = 8  # operations, with those that put the target in place
State = dict[str, bytes] | bytes | None


@dataclass(frozen=True)
class Writer:
    """write: (model, target, which of two versions). replaces: whether the target may exist before."""

    write: Callable[[Path, Path, int], object]
    replaces: bool
    target: str = "out"


def _site(model: Path, target: Path, version: int) -> object:
    return write_site(model, target, title=f"version {version}", overwrite=target.exists())


def _sampler(_model: Path, target: Path, version: int) -> object:
    options = TopWOptions(metric="uniform")
    return export_sampler(
        None, target, vocab_size=300 + version, **asdict(options), verify=False, overwrite=target.exists()
    )


def _session(_model: Path, target: Path, version: int) -> object:
    return write_session(target, FORM, TOKENS, states_of(5, version))


def _triton(model: Path, target: Path, _version: int) -> object:
    return write_repository(model, target.parent, name=target.name)


WRITERS = {
    "web-new": Writer(_site, False),
    "web-replace": Writer(_site, True),
    "sampler-new": Writer(_sampler, False),
    "sampler-replace": Writer(_sampler, True),
    "session-new": Writer(_session, False),
    "session-replace": Writer(_session, True),
    "triton": Writer(_triton, False, "repository/out"),
}


def state(path: Path) -> State:
    if not path.exists():
        return None
    return read_contents(path) if path.is_dir() else path.read_bytes()


def main(name: str, model: Path, folder: Path, share: int) -> None:
    writer, work = WRITERS[name], folder / "work"
    target = work / writer.target

    def prepare() -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        if writer.replaces:
            writer.write(model, target, 1)

    prepare()
    old = state(target)
    count = folder / "count"

    def counted() -> None:
        numbers: list[int] = []
        watch(work, lambda number, _: numbers.append(number))
        writer.write(model, target, 0)
        count.write_text(str(len(numbers)))

    assert in_child(counted) == 0
    new, operations, wrong = state(target), int(count.read_text()), []
    for stop in sorted({*range(0, operations, share), *range(max(0, operations - _LAST), operations)}):
        prepare()

        def killed(stop: int = stop) -> None:
            watch(work, lambda number, _: number == stop and os.kill(os.getpid(), signal.SIGKILL))
            writer.write(model, target, 0)

        if not os.WIFSIGNALED(in_child(killed)):
            wrong.append(f"{stop}: it was not killed")
        found = state(target)
        if found not in (old, new):
            wrong.append(f"{stop}: neither the old state nor the new one")
        repository = target.parent if target.parent != work else None
        beside = {path.name for path in work.iterdir() if not path.name.startswith(".")}
        beside |= (
            {path.name for path in repository.iterdir()} if repository is not None and repository.exists() else set()
        )
        if beside - {target.name, target.parent.name}:
            wrong.append(f"{stop}: left {sorted(beside)}")
        if found == new and not writer.replaces:
            continue
        if in_child(lambda: writer.write(model, target, 0)) or state(target) != new:
            wrong.append(f"{stop}: the next one fails")
    sys.stdout.write(json.dumps({"operations": operations, "wrong": wrong}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
