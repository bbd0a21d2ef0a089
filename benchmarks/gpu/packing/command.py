"""`python -m benchmarks.gpu pack`: archives for a GPU host without a network. Needs the package index.

    python -m benchmarks.gpu pack [--limit 60MiB] [--sm 90] [--python 3.12] [--into out/pack] [--only COMPONENT ...]

Writes .tar.xz files, and pack.json with their contents, sizes, SHA-256 and missing components. On the host: python3 -m
benchmarks.gpu --pack ARCHIVE ...

Exit code: 0 if every requested component was packed, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.packing import archives, folders, onnxruntime_gpu, packages, tensorrt
from benchmarks.gpu.packing.component import Packed
from benchmarks.gpu.packing.wheels import Host
from benchmarks.gpu.unpack import FORMAT, INDEX
from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.text import parse_size

COMPONENTS = ("folders", "packages", "onnxruntime", "tensorrt")
ROOT = Path(__file__).resolve().parents[3]
_PACKAGES: dict[str, Callable[[Path, Path, Host], Packed]] = {
    "packages": packages.stage,
    "onnxruntime": onnxruntime_gpu.stage,
    "tensorrt": tensorrt.stage,
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", default="60MiB", help="maximum size of an archive; default: 60MiB")
    parser.add_argument("--sm", type=int, default=90, help="the host's GPU; default: 90, an H100's or H200's sm_90")
    parser.add_argument("--python", default="3.12", help="the host's Python; default: 3.12")
    parser.add_argument("--into", type=Path, default=ROOT / "out" / "pack", help="default: out/pack of the checkout")
    parser.add_argument("--only", nargs="+", choices=COMPONENTS, default=list(COMPONENTS), metavar="COMPONENT",
                        help=", ".join(COMPONENTS))  # fmt: skip
    parser.add_argument("--rehearse", action="store_true", help="pack only one folder, unverified: takes a minute")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    given = arguments().parse_args(words)
    try:
        limit = parse_size(given.limit)
        return pack(given.into, given.only, limit, Host(given.sm, given.python), rehearse=given.rehearse)
    except (BenchmarkError, ParameterError) as error:
        raise SystemExit(str(error)) from None


def pack(into: Path, names: Sequence[str], limit: int, host: Host, *, rehearse: bool = False) -> int:
    """Pack the named components. Returns the exit code. Raises BenchmarkError for a bad folder or limit."""
    _clear(into)
    index: dict[str, Any] = {
        "format": FORMAT, "sm": host.sm, "python": host.python, "limit": limit, "rehearsal": rehearse,
        "archives": [], "components": {}, "slices": {}, "absent": {},
    }  # fmt: skip
    for name in [name for name in COMPONENTS if name in names]:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="topw-pack-") as folder:
            tree = Path(folder, "tree")
            tree.mkdir()
            try:
                packed = _stage(name, tree / name, Path(folder), host, rehearse)
            except BenchmarkError as error:
                index["absent"][name] = str(error)
                _say(f"NOT PACKED {name}: {error}")
                continue
            _add(index, name, packed, tree, into, limit)
        _say(f"{name}: {_sizes(index, name)}, {time.monotonic() - started:.0f} s")
    (into / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    _say(f"{into / INDEX}")
    return 1 if index["absent"] else 0


def _stage(name: str, tree: Path, scratch: Path, host: Host, rehearse: bool) -> Packed:
    if name != "folders":
        return _PACKAGES[name](tree, scratch, host)
    if rehearse:
        return folders.stage(tree, ["float16-gqa"], verify=False, seeds=1, new_tokens=16)
    return folders.stage(tree, list(folders.FORMS))


def _add(index: dict[str, Any], name: str, packed: Packed, tree: Path, into: Path, limit: int) -> None:
    written = archives.write(tree, into, f"pack-{name}", limit)
    files = [path for path in sorted(tree.rglob("*")) if path.is_file() and not path.is_symlink()]
    index["archives"] += written.archives
    index["slices"] |= written.slices
    index["components"][name] = {
        **packed.as_json(name),
        "archives": [archive["name"] for archive in written.archives],
        "bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
        "contents": sorted({path.relative_to(tree / name).parts[0] for path in files}),
    }


def _clear(into: Path) -> None:
    """Delete an earlier call's files. Raises BenchmarkError if the folder has other files."""
    into.mkdir(parents=True, exist_ok=True)
    for path in into.iterdir():
        if path.name != INDEX and not (path.name.startswith("pack-") and path.name.endswith(archives.SUFFIX)):
            raise BenchmarkError(
                f"{into} holds {path.name}, which this command did not write; give an empty folder with --into."
            )
    for path in into.iterdir():
        path.unlink()


def _sizes(index: dict[str, Any], name: str) -> str:
    mine = index["components"][name]["archives"]
    return ", ".join(f"{a['name']} {a['bytes'] / 2**20:.1f} MiB" for a in index["archives"] if a["name"] in mine)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
