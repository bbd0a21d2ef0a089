"""Stages that a resumed export can skip, each stamped with its inputs.

These stages are stamped: traced graph, neighbour bound, each weight, copied data files, tokenizer files and
verification. All others take seconds.

Small files are stamped by SHA-256. Large ones, too slow to hash, by device, inode, size, mtime, ctime and the SHA-256
of their first megabyte, where safetensors and ONNX store names and shapes. Programs cannot reset ctime, so every write
is noticed; copying or hard-linking a file changes it too and restarts a stage needlessly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from topw_deploy.export.graft.neighbour_bound import Measure
from topw_deploy.export.request import ExportRequest
from topw_deploy.export.resume.journal import DataLog, Journal, stamp_of
from topw_deploy.export.source.resolve import Source
from topw_deploy.manifest import Manifest, Verification, sha256_of, verification_from_dict
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWParameters
from topw_deploy.versions import library_versions

_TOKENIZER = "tokenizer files"
_HASHED_WHOLE = 16 << 20
_HEAD = 1 << 20
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZER_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
_SMALL_FILES = ("config.json", "*.index.json", "genai_config.json", "tokenizer.json", "*.py")


class FinishedStages:
    """Finished stages of one export.

    source: stamp of source files (stamp_of_source).
    trace, weights: stamps of the inputs of traced graph and weights.
    """

    def __init__(self, journal: Journal, request: ExportRequest, source: str = "") -> None:
        self.journal = journal
        graph = request.graph
        # Omit options that change neither graph nor weights.
        weights = dataclasses.replace(request.weights, max_shard_size=None, hard_link=False)
        sampler = dataclasses.replace(request.sampler, defaults=TopWParameters(), default_beta="")
        common = (source, request.hub.trust_remote_code, library_versions())
        self.trace = stamp_of(*common, weights.torch_dtype, graph.opset, graph.target, graph.num_hidden_layers)
        self.weights = stamp_of(*common, *map(repr, (graph, weights, sampler)))

    def clear(self, folder: Path, wanted: Iterable[str]) -> None:
        """Remove an earlier attempt's files, except `wanted` and tokenizer files."""
        stay = {folder / name for name in (*wanted, *self.journal.last_note(_TOKENIZER).get("made", ()))}
        for path in sorted(folder.rglob("*"), reverse=True):  # files before their folder
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in stay:
                path.unlink()

    def data_log(self) -> DataLog:
        return DataLog(self.journal, self.weights)

    def measured(self, measure: Measure) -> Measure:
        """`measure`, whose result the journal keeps."""

        def kept(geometry: Geometry, tokens: int) -> np.ndarray:
            # The source's stamp omits an ONNX decoder's data files in subfolders; these statistics depend on them.
            statistics = (np.asarray(geometry.mean).tolist(), np.asarray(geometry.inverse_std).tolist())
            stamp = stamp_of(self.weights, *statistics)
            return self.journal.array("neighbour bound", stamp, lambda: measure(geometry, tokens))

        return kept

    def copied(self, source: Path, target: Path, copy: Callable[[], object], hard_link: bool) -> bool:
        """Call `copy` to make `target` from `source`, unless that is done. Returns whether it was called.

        hard_link: whether `target` is to be a hard link. A copy does not count as a link, nor a link as a copy.
        """
        stage, stamp = f"copy of {target.name}", stamp_of(str(source), stamp_of_files([source.resolve()]), hard_link)
        size = source.resolve().stat().st_size
        if target.is_file() and target.stat().st_size == size and self.journal.find(stage, stamp) is not None:
            return False
        target.unlink(missing_ok=True)
        copy()
        self.journal.done(stage, stamp)
        return True

    def tokenizer_files(self, folder: Path, output: Path, write: Callable[[], list[str]]) -> list[str]:
        """Call `write`, which writes the tokenizer and returns notices, unless that is done. Returns its notices."""
        inputs = [path for path in folder.iterdir() if path.suffix in _TOKENIZER_SUFFIXES]
        stamp = stamp_of(stamp_of_files(inputs), library_versions())
        found = self.journal.find(_TOKENIZER, stamp, made=dict, notices=list)
        if found is not None and all(_is(output / name, digest) for name, digest in found["made"].items()):
            return list(found["notices"])
        for name in self.journal.last_note(_TOKENIZER).get("made", ()):
            (output / name).unlink(missing_ok=True)
        before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
        notices = write()
        made = {p.name: sha256_of(p) for p in output.iterdir() if p.stat().st_mtime_ns != before.get(p)}
        self.journal.done(_TOKENIZER, stamp, made=made, notices=notices)
        return notices

    def verified(
        self, manifest: Manifest, verify: Callable[[], tuple[Verification, bool]]
    ) -> tuple[Verification, bool]:
        """The result of `verify` for `manifest`, computed once."""
        stage, files = "verification", [dataclasses.asdict(entry) for entry in manifest.files.values()]
        stamp = stamp_of(self.weights, files, dataclasses.asdict(manifest.defaults))
        found = self.journal.find(stage, stamp, verification=dict, may_pad=bool)
        if found is not None:
            with contextlib.suppress(ValueError):  # written by another program: verify again
                return verification_from_dict(found["verification"]), found["may_pad"]
        verification, may_pad = verify()
        self.journal.done(stage, stamp, verification=dataclasses.asdict(verification), may_pad=may_pad)
        return verification, may_pad


def stamp_of_source(source: Source) -> str:
    if source.onnx is None:
        return stamp_of_files(path for pattern in (*_WEIGHTS, *_SMALL_FILES) for path in source.folder.glob(pattern))
    small = [path for pattern in _SMALL_FILES for path in source.folder.glob(pattern)]
    return stamp_of_files([*small, *source.onnx.parent.iterdir()])


def stamp_of_files(files: Iterable[Path]) -> str:
    """Stamp regular files' names and contents."""
    return stamp_of([_file(path) for path in sorted(set(files)) if path.is_file()])


def _file(path: Path) -> list[object]:
    about = path.stat()
    with path.open("rb") as stream:
        if about.st_size <= _HASHED_WHOLE:
            return [path.name, hashlib.file_digest(stream, "sha256").hexdigest()]
        head = hashlib.sha256(stream.read(_HEAD)).hexdigest()
    return [path.name, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns, head]


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_of(path) == digest
