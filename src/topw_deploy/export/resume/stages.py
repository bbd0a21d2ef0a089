"""The stages of an export that an interrupted one need not repeat, each under the stamp of what it is made from.

The traced graph, the neighbour bound, every weight of the data files, the copies of an ONNX decoder's data files, the
tokenizer's files and the verification. What lies between them (lowering, the graft, the manifest) takes seconds and is
done again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from topw_deploy.export.graft.neighbour_bound import Measure
from topw_deploy.export.request import ExportRequest
from topw_deploy.export.resume.journal import DataLog, Journal
from topw_deploy.export.resume.stamp import stamp_of, stamp_of_files
from topw_deploy.export.write.libraries import library_versions
from topw_deploy.manifest import Manifest, Verification, sha256_of, verification_from_dict
from topw_deploy.sampling import Geometry

# What of a request does not change the decoder and its sampler.
_ELSEWHERE = {"model", "output", "overwrite", "keep_failed", "dry_run", "resume", "verify", "defaults", "tokenizer"}
_ELSEWHERE |= {"hard_link", "token", "cache_dir", "revision", "local_files_only", "max_shard_size"}
_TOKENIZER = "tokenizer files"
_TRACED = ("opset", "target", "num_hidden_layers", "trust_remote_code")  # beside torch's dtype


class Stages:
    """source: the stamp of the source's files (stamp_of_source)."""

    def __init__(self, journal: Journal, request: ExportRequest, source: str) -> None:
        self.journal = journal
        libraries = library_versions()
        wanted = {name: value for name, value in dataclasses.asdict(request).items() if name not in _ELSEWHERE}
        traced = {name: wanted[name] for name in _TRACED}
        self.trace = stamp_of(source, request.torch_dtype, traced, libraries)
        self.weights = stamp_of(source, wanted, libraries)

    def clear(self, folder: Path, wanted: Iterable[str]) -> None:
        """Remove from `folder` what an earlier attempt wrote and this one does not: all but the files `wanted`, and
        those of the tokenizer, of which `small_files` decides."""
        stay = {folder / name for name in (*wanted, *self.journal.noted(_TOKENIZER).get("made", ()))}
        for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder before the folder
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in stay:
                path.unlink()

    def log(self) -> DataLog:
        """What is in the data files."""
        return DataLog(self.journal, self.weights)

    def measured(self, measure: Measure) -> Measure:
        """`measure`, made once."""
        stage = "neighbour bound"

        def kept(geometry: Geometry, tokens: int) -> np.ndarray:
            # The table's statistics tell of data files in folders below an ONNX decoder's, which `source` leaves out.
            stamp = stamp_of(
                self.weights, np.asarray(geometry.mean).tolist(), np.asarray(geometry.inverse_std).tolist()
            )
            found = self.journal.array(stage, stamp)
            if found is None:
                found = measure(geometry, tokens)
                self.journal.keep_array(stage, stamp, found)
            return found

        return kept

    def copied(self, source: Path, target: Path, bring: Callable[[], object], hard_link: bool) -> bool:
        """Call `bring`, which makes `target` of `source`, unless it was called; returns whether it was not.

        hard_link: whether `target` is to be a second name of `source`, which a copy does not stand for, nor it for one.
        """
        stage, stamp = f"copy of {target.name}", stamp_of(str(source), stamp_of_files([source.resolve()]), hard_link)
        size = source.resolve().stat().st_size
        if target.is_file() and target.stat().st_size == size and self.journal.find(stage, stamp) is not None:
            return False
        target.unlink(missing_ok=True)
        bring()
        self.journal.done(stage, stamp)
        return True

    def small_files(self, folder: Path, output: Path, bring: Callable[[], list[str]]) -> list[str]:
        """Call `bring`, which makes tokenizer files of `folder` in `output` and says what it says, unless it was."""
        inputs = [path for path in folder.iterdir() if path.suffix in (".json", ".txt", ".model", ".jinja", ".py")]
        stamp = stamp_of(stamp_of_files(inputs), library_versions())
        found = self.journal.find(_TOKENIZER, stamp)
        if found is not None and all(_is(output / name, digest) for name, digest in found["made"].items()):
            return list(found["notices"])
        for name in self.journal.noted(_TOKENIZER).get("made", ()):
            (output / name).unlink(missing_ok=True)
        before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
        notices = bring()
        made = {p.name: sha256_of(p) for p in output.iterdir() if p.stat().st_mtime_ns != before.get(p)}
        self.journal.done(_TOKENIZER, stamp, made=made, notices=notices)
        return notices

    def verified(
        self, manifest: Manifest, verify: Callable[[], tuple[Verification, bool]]
    ) -> tuple[Verification, bool]:
        """The result of `verify` on the files and defaults of `manifest`, made once."""
        stage, files = "verification", [dataclasses.asdict(entry) for entry in manifest.files.values()]
        stamp = stamp_of(self.weights, files, dataclasses.asdict(manifest.defaults))
        found = self.journal.find(stage, stamp)
        if found is not None:
            return verification_from_dict(found["verification"]), bool(found["may_pad"])
        verification, may_pad = verify()
        self.journal.done(stage, stamp, verification=dataclasses.asdict(verification), may_pad=may_pad)
        return verification, may_pad


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_of(path) == digest
