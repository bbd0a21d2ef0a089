"""Run exports in processes of their own, with limits on time and memory, and keep their results in a JSON file.

`python -m benchmarks.coverage.runner TYPE FORM FOLDER`, the child, prints a Result as JSON on its last line.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import say
from benchmarks.coverage.tiny_models import write_checkpoint
from topw_deploy.folders import atomic_file

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # wall-clock time of one export
MEMORY = 6 << 30  # bytes of data of each process
FORMS = {"default": {}, "tensorrt": {"target": "tensorrt"}, "int4": {"dtype": "int4"}}
"""Form -> options of export_model."""

RESULTS = Path(__file__).with_name("results.json")
"""The results behind docs/models.md."""

EXPORTED, REFUSED, WRONG, FAILED, BROKEN = "exported", "refused", "wrong", "failed", "broken"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One architecture in one form.

    outcome: EXPORTED (and verified), REFUSED by the exporter, WRONG (verification failed), FAILED (any other error, a
    timeout, or too little memory), or BROKEN (the architecture's own code fails in torch).
    states: kind of state -> number of layers that have one; empty without an export.
    context: the export's context length; that of most tiny models is CONTEXT, of a few less.
    difference: largest difference to torch's logits.
    reason: why there is no export.
    """

    model_type: str
    form: str
    outcome: str
    seconds: float = 0.0
    status: str = ""
    states: dict[str, int] = field(default_factory=dict)
    context: int = 0
    difference: float | None = None
    reason: str = ""


class ResultFile:
    """Results by model type and form; written after each one, so that an interrupted run continues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        records = json.loads(path.read_text("utf-8"))["results"] if path.exists() else []
        self._results = {(each["model_type"], each["form"]): Result(**each) for each in records}

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results[key] for key in sorted(self._results))

    def find(self, model_type: str, form: str) -> Result | None:
        return self._results.get((model_type, form))

    def add(self, result: Result) -> None:
        """Add a result and replace the file."""
        with self._lock:
            self._results[result.model_type, result.form] = result
            with atomic_file(self._path) as stream:
                stream.write(json.dumps({"results": [asdict(each) for each in self]}, indent=1).encode() + b"\n")


def run_all(
    wanted: Sequence[tuple[str, str]],
    file: ResultFile,
    jobs: int = 1,
    seconds: float = SECONDS,
    again: bool = False,
) -> None:
    """Export each (model type, form) that `file` lacks, or all with `again`."""
    left = [pair for pair in wanted if again or file.find(*pair) is None]

    def one(pair: tuple[str, str]) -> None:
        result = run_one(*pair, seconds)
        file.add(result)
        what = f"{result.difference:.1e}" if result.difference is not None else result.reason[:120]
        say(f"{result.model_type} {result.form}: {result.outcome} in {result.seconds:.0f} s, {what}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, left))


def run_one(model_type: str, form: str, seconds: float = SECONDS, memory: int = MEMORY) -> Result:
    """Export in a child process, which is killed with its children at the time limit."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="coverage-") as scratch, tempfile.TemporaryFile("w+") as complaints:
        command = [sys.executable, "-m", "benchmarks.coverage.runner", model_type, form, scratch]
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (memory, memory)),
        )
        try:
            output, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            output = ""
            reason = f"not finished after {seconds:.0f} s"
        else:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or ["no message"])[-1]
            reason = f"the process ended with {child.returncode}: {last[:300]}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = output.strip().splitlines()
    if child.returncode == 0 and lines:
        return Result(**json.loads(lines[-1]))
    took = round(time.monotonic() - started, 1)
    return Result(model_type=model_type, form=form, outcome=FAILED, reason=reason, seconds=took)


def export_one(model_type: str, form: str, folder: Path) -> Result:
    """Export one tiny model in this process."""
    from topw_deploy.errors import one_line

    try:
        checkpoint = write_checkpoint(model_type, folder / "checkpoint")
    except Exception as error:  # noqa: BLE001  # model code can raise anything
        return Result(model_type=model_type, form=form, outcome=BROKEN, reason=one_line(error, 400))
    started = time.monotonic()
    outcome = _export_result(checkpoint, folder / "export", FORMS[form])
    return Result(model_type=model_type, form=form, seconds=round(time.monotonic() - started, 1), **outcome)


def _export_result(checkpoint: Path, output: Path, options: dict[str, Any]) -> dict[str, Any]:
    from topw_deploy.errors import TopWError, VerificationError, one_line
    from topw_deploy.export import export_model
    from topw_deploy.manifest import load_decoder_manifest

    try:
        export_model(checkpoint, output, **options)
    except VerificationError as error:
        return {"outcome": WRONG, "reason": one_line(error, 400)}
    except TopWError as error:
        return {"outcome": REFUSED, "reason": one_line(error, 400).replace(str(checkpoint), "the folder")}
    except Exception as error:  # noqa: BLE001  # an unexpected error is a result too
        return {"outcome": FAILED, "reason": f"{type(error).__name__}: {one_line(error, 400)}"}
    manifest = load_decoder_manifest(output)
    kinds = {(state.layer, state.kind) for state in manifest.decoder.states}
    checks = manifest.verification.checks
    return {
        "outcome": EXPORTED if all(check.passed for check in checks) else WRONG,
        "status": manifest.verification.status,
        "states": dict(Counter(kind for _, kind in kinds)),
        "context": manifest.decoder.context_length,
        "difference": max(check.difference for check in checks if check.name.endswith("logits")),
        "reason": "; ".join(f"{check.name} {check.difference:.2g}" for check in checks if not check.passed),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(asdict(export_one(sys.argv[1], sys.argv[2], Path(sys.argv[3])))), flush=True)
