"""Stages that a resumed export can skip, each stamped with its inputs.

These stages are stamped: the traced graph, the neighbour bound, each weight, copied data files, tokenizer files and the
verification. All others take seconds.

The stamp of a small file is its SHA-256. A large file takes too long to hash: its stamp is device, inode, size, mtime,
ctime and the SHA-256 of its first MiB, where safetensors and ONNX store names and shapes. Programs cannot set ctime, so
every write changes the stamp. Copying or hard-linking a file also changes it, which restarts a stage without need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np

from topw_deploy.export.request import ExportRequest
from topw_deploy.export.resume.journal import DataLog, Journal, stamp_of
from topw_deploy.export.sampler.neighbour_bound import Measure
from topw_deploy.export.source.resolve import Source
from topw_deploy.install import library_versions
from topw_deploy.manifest import Manifest, Verification, sha256_of
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWParameters

_TOKENIZER = "tokenizer files"
_WHOLE_BYTES = 16 << 20
_HEAD_BYTES = 1 << 20
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZER_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
_SMALL_FILES = ("config.json", "*.index.json", "genai_config.json", "tokenizer.json", "*.py")


class FinishedStages:
    """The finished stages of one export.

    source: the stamp of the source's files (stamp_of_source).
    trace: the stamp of the inputs of the traced graph.
    weights: the stamp of the inputs of the weights.
    """

    def __init__(self, journal: Journal, request: ExportRequest, source: str = "") -> None:
        self.journal = journal
        graph = request.graph
        # Leave out the options that change neither the graph nor the weights.
        weights = dataclasses.replace(request.weights, max_shard_size=None, hard_link=False)
        sampler = dataclasses.replace(request.sampler, defaults=TopWParameters(), default_beta="")
        common = (source, request.hub.trust_remote_code, library_versions())
        self.trace = stamp_of(*common, weights.torch_dtype, graph.opset, graph.target, graph.num_hidden_layers)
        self.weights = stamp_of(*common, *map(repr, (graph, weights, sampler)))

    def remove_other_files(self, folder: Path, wanted: Iterable[str]) -> None:
        """Remove the files of an earlier attempt from `folder`, except `wanted` and tokenizer files."""
        stay = {folder / name for name in (*wanted, *self.journal.last_note(_TOKENIZER).get("made", ()))}
        for path in sorted(folder.rglob("*"), reverse=True):  # files before their folder
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in stay:
                path.unlink()

    def data_log(self) -> DataLog:
        """Return the log of the weights in data files."""
        return DataLog(self.journal, self.weights)

    def keep_measurement(self, measure: Measure) -> Measure:
        """Return a function like `measure` that keeps its result in the journal."""

        def kept(geometry: Geometry, tokens: int) -> np.ndarray:
            # The source's stamp does not cover data files in subfolders of an ONNX decoder, but these statistics do.
            statistics = (np.asarray(geometry.mean).tolist(), np.asarray(geometry.inverse_std).tolist())
            stamp = stamp_of(self.weights, *statistics)
            return self.journal.array_once("neighbour bound", stamp, lambda: measure(geometry, tokens))

        return kept

    def copy_once(self, source: Path, target: Path, copy: Callable[[], object], hard_link: bool) -> bool:
        """Call `copy` to make `target` from `source`, unless an earlier attempt has made it.

        Returns whether `copy` was called.

        hard_link: whether `copy` makes a hard link. A copy that exists is not used as a link, nor a link as a copy.
        """
        stage, stamp = f"copy of {target.name}", stamp_of(str(source), stamp_of_files([source.resolve()]), hard_link)
        size = source.resolve().stat().st_size
        if target.is_file() and target.stat().st_size == size and self.journal.find(stage, stamp) is not None:
            return False
        target.unlink(missing_ok=True)
        copy()
        self.journal.record(stage, stamp)
        return True

    def write_tokenizer_once(self, folder: Path, output: Path, write: Callable[[], list[str]]) -> list[str]:
        """Call `write`, which converts the tokenizer of `folder`, unless an earlier attempt has done so.

        Returns the notices of `write`.
        """
        inputs = [path for path in folder.iterdir() if path.suffix in _TOKENIZER_SUFFIXES]
        stamp = stamp_of(stamp_of_files(inputs), library_versions())
        found = self.journal.find(_TOKENIZER, stamp, made=dict, notices=list)
        if found is not None and all(_has_hash(output / name, digest) for name, digest in found["made"].items()):
            return list(found["notices"])
        for name in self.journal.last_note(_TOKENIZER).get("made", ()):
            (output / name).unlink(missing_ok=True)
        before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
        notices = write()
        made = {p.name: sha256_of(p) for p in output.iterdir() if p.stat().st_mtime_ns != before.get(p)}
        self.journal.record(_TOKENIZER, stamp, made=made, notices=notices)
        return notices

    def verify_once(
        self, manifest: Manifest, verify: Callable[[], tuple[Verification, bool]]
    ) -> tuple[Verification, bool]:
        """Return the result of `verify` for `manifest`.

        If an earlier attempt verified the same files, return its result.
        """
        stage, files = "verification", msgspec.to_builtins(list(manifest.files.values()))
        stamp = stamp_of(self.weights, files, dataclasses.asdict(manifest.defaults))
        found = self.journal.find(stage, stamp, verification=dict, may_pad=bool)
        if found is not None:
            with contextlib.suppress(ValueError):  # another program wrote the line
                return msgspec.convert(found["verification"], Verification), found["may_pad"]
        verification, may_pad = verify()
        self.journal.record(stage, stamp, verification=msgspec.to_builtins(verification), may_pad=may_pad)
        return verification, may_pad


def stamp_of_source(source: Source) -> str:
    """Return the stamp of the files that determine the exported graph and weights."""
    if source.onnx is None:
        return stamp_of_files(path for pattern in (*_WEIGHTS, *_SMALL_FILES) for path in source.folder.glob(pattern))
    small = [path for pattern in _SMALL_FILES for path in source.folder.glob(pattern)]
    return stamp_of_files([*small, *source.onnx.parent.iterdir()])


def stamp_of_files(files: Iterable[Path]) -> str:
    """Return the stamp of the names and contents of regular files; others are ignored."""
    return stamp_of([_file_stamp(path) for path in sorted(set(files)) if path.is_file()])


def _file_stamp(path: Path) -> list[object]:
    about = path.stat()
    with path.open("rb") as stream:
        if about.st_size <= _WHOLE_BYTES:
            return [path.name, hashlib.file_digest(stream, "sha256").hexdigest()]
        head = hashlib.sha256(stream.read(_HEAD_BYTES)).hexdigest()
    return [path.name, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns, head]


def _has_hash(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_of(path) == digest
