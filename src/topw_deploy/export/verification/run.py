"""Start the verification process for an export or `topw verify`, and collect its results."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import msgspec
from msgspec import structs

from topw_deploy.errors import SourceError, VerificationError
from topw_deploy.export.options import ExportOptions
from topw_deploy.export.source.resolve import Source, resolve
from topw_deploy.manifest import Check, DecoderManifest, Manifest, NotCompared, Note, Status, Verification
from topw_deploy.progress import Progress


@dataclass(frozen=True)
class PairDistance:
    """A measurement: the median distance of pairs of likely tokens."""

    median: float


Result = Check | NotCompared | Note | PairDistance

# Names of the checks that another exporter's decoder may fail; see `verify_in_subprocess`.
LEFT_PADDED = "left-padded batch logits"
RIGHT_PADDED = "right-padded batch logits"

_KINDS: dict[str, type[Result]] = {
    "check": Check,
    "not_compared": NotCompared,
    "note": Note,
    "pair_distance": PairDistance,
}


@dataclass(frozen=True)
class Outcome:
    """All results of one verification.

    peak: the largest memory of the process in bytes; 0 if unknown.
    median_distance: of pairs of likely tokens; None if it was not measured.
    """

    checks: tuple[Check, ...]
    not_compared: tuple[NotCompared, ...] = ()
    notes: tuple[Note, ...] = ()
    peak: int = 0
    median_distance: float | None = None

    @classmethod
    def of(cls, results: Iterable[Result], peak: int = 0) -> Outcome:
        """Sort results by their kind."""
        found = list(results)
        return cls(
            tuple(result for result in found if isinstance(result, Check)),
            tuple(result for result in found if isinstance(result, NotCompared)),
            tuple(result for result in found if isinstance(result, Note)),
            peak,
            next((result.median for result in found if isinstance(result, PairDistance)), None),
        )

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if not check.passed)

    def verification(self) -> Verification:
        """The record for the manifest: "passed" if everything was compared and all checks passed, else "partial"."""
        status: Status = "partial" if self.not_compared or self.failed else "passed"
        return Verification(
            status=status,
            checks=self.checks,
            not_compared=self.not_compared,
            notes=self.notes,
            median_distance=self.median_distance,
        )


def encode_result(result: Result) -> dict[str, Any]:
    """Encode a result as {kind: fields}, for JSON."""
    kind = next(kind for kind, each in _KINDS.items() if isinstance(result, each))
    return {kind: msgspec.to_builtins(result)}


def decode_result(line: dict[str, Any]) -> Result | None:
    """Decode what `encode_result` returned; None for other lines of the worker."""
    for kind, each in _KINDS.items():
        if kind in line:
            return msgspec.convert(line[kind], each)
    return None


def format_result(result: Result) -> str:
    """Format a result as a line such as `-[✓] prefill logits: 3.6e-07 (bound 1e-04; 64 tokens, torch)`.

    The mark is ✓ for a check that passed, x for one that failed, - for what was not compared, and i for a note.
    """
    if isinstance(result, Note):
        return f"  -[i] {result.name}: {result.text}"
    if isinstance(result, PairDistance):
        return f"  -[i] median distance of likely pairs: {result.median:.4g}"
    if isinstance(result, NotCompared):
        return f"  -[-] {result.name}: not compared, {result.reason}"
    mark = "✓" if result.passed else "x"
    return f"  -[{mark}] {result.name}: {result.difference:.2g} (bound {result.bound:.2g}; {result.detail})"


_TERMINATION_SECONDS = 5.0  # for the process to end after a signal, before it is killed
_EQUAL_LENGTHS = "so the prompts of a batch must have equal lengths"


def verify_in_subprocess(
    source: Source, options: ExportOptions, folder: Path, progress: Progress
) -> tuple[Verification, bool, int]:
    """Verify a new export. Returns the record for the manifest, whether batches may be padded, and the peak of memory.

    Another exporter's decoder may fail one of the padding checks; the manifest records it, and batches may then not be
    padded. Raises VerificationError for any other failed check.
    """
    task = {
        "folder": str(folder),
        "onnx": str(source.onnx) if source.onnx else None,
        "checkpoint": None if source.onnx else str(source.folder),
        "num_hidden_layers": options.num_hidden_layers,
        "trust_remote_code": options.trust_remote_code,
        "measure": True,
    }
    outcome = run_checks(task, progress)
    failed = [check.name for check in outcome.failed]
    if source.onnx is not None and failed in ([LEFT_PADDED], [RIGHT_PADDED]):
        limited = replace(outcome, checks=tuple(map(_add_limit, outcome.checks)))
        return limited.verification(), False, outcome.peak
    if outcome.failed:
        worst = outcome.failed[0]
        raise VerificationError(
            f"{len(outcome.failed)} of {len(outcome.checks)} checks failed (first: {worst.name}, difference "
            f"{worst.difference:.3g}, bound {worst.bound:.3g}); nothing was kept, --keep-failed keeps the files."
        )
    return outcome.verification(), True, outcome.peak


def _add_limit(check: Check) -> Check:
    """Add to a failed padding check what follows from it. Its difference becomes finite, as the manifest requires."""
    if check.passed:
        return check
    difference = min(check.difference, sys.float_info.max) if check.difference >= 0 else sys.float_info.max  # NaN
    return structs.replace(check, difference=difference, detail=f"{check.detail}; {_EQUAL_LENGTHS}")


def recheck(
    folder: Path, manifest: Manifest, named: str | None, trust_remote_code: bool, progress: Progress
) -> Outcome:
    """Compare a finished export with its source, for `topw verify`.

    Downloads nothing: a source on the hub must be in the local cache. Compares nothing for a sampler-only folder.

    named: the source, a hub id or a folder; None for the manifest's.
    """
    if not isinstance(manifest, DecoderManifest):
        reason = "this is a sampler-only model"
        return Outcome((), (NotCompared("decoder logits", reason), NotCompared("generation", reason)))
    task: dict[str, Any] = {"folder": str(folder), "trust_remote_code": trust_remote_code, "native": True}
    try:
        revision = None if named or manifest.source.get("revision") == "local" else manifest.source.get("revision")
        source = resolve(named or manifest.source["id"], revision=revision, local_files_only=True)
    except SourceError as error:
        task["no_reference"] = f"the source is not available ({error})"
    else:
        if source.onnx is not None:
            task["onnx"] = str(source.onnx)
        else:
            task |= {"checkpoint": str(source.folder), "num_hidden_layers": manifest.decoder.num_layers}
    return run_checks(task, progress)


def run_checks(task: dict[str, Any], progress: Progress) -> Outcome:
    """Run the verification process, and report results as they arrive.

    Keys of `task`:
        folder: the export.
        onnx or checkpoint: the source. Without one, `no_reference` says why.
        num_hidden_layers, trust_remote_code: options for loading the checkpoint.
        native: whether to check this machine's native sampler too.
        measure: whether to measure the median distance of likely pairs too.

    Raises VerificationError if the process fails; failed checks are part of the outcome.
    """
    results: list[Result] = []
    error, peak = None, 0
    for line in _read_worker(task):
        result = decode_result(line)
        if result is not None:
            results.append(result)
            progress.say(format_result(result))
        elif "peak" in line:
            peak = int(line["peak"])
        else:
            error = line["error"]
    outcome = Outcome.of(results, peak)
    if error is not None:
        failed = [check.name for check in outcome.failed]
        after = f" after these checks had failed: {', '.join(failed)}" if failed else ""
        raise VerificationError(f"verification stopped{after}: {error}")
    return outcome


def _read_worker(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start the process and yield its lines of JSON. Raises VerificationError if it ends without stating an error."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = start(json.dumps(task), errors)
        try:
            has_stated_error = False
            for text in cast("IO[str]", process.stdout):  # a pipe
                line = json.loads(text)
                has_stated_error = has_stated_error or "error" in line
                yield line
            if process.wait() != 0 and not has_stated_error:
                errors.seek(0)
                lines = errors.read().strip().splitlines() or ["no message"]
                raise VerificationError(
                    f"the verification ended with exit code {process.returncode} ({lines[-1][:300]}); "
                    "report this, or export with --no-verify."
                )
        finally:
            if process.poll() is None:
                _terminate(process)
            process.wait()


def _terminate(process: subprocess.Popen[str]) -> None:
    """End the process by a signal, so that it removes its temporary files, which may be as large as the model."""
    process.terminate()
    try:
        process.wait(_TERMINATION_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def start(task: str, errors: IO[str]) -> subprocess.Popen[str]:
    """Start the verification process, with a pipe as its standard output.

    task: JSON, see `run_checks`.
    errors: its standard error.
    """
    command = [sys.executable, "-m", "topw_deploy.export.verification.worker", task]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8")
