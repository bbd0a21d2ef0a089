"""Export one tiny model in a process of its own: `worker TYPE FORM FOLDER` prints a Result as JSON on its last line."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.coverage.results import BROKEN, EXPORTED, FAILED, FORMS, REFUSED, WRONG, Result
from benchmarks.coverage.tiny_models import write_checkpoint


def main(model_type: str, form: str, folder: Path) -> Result:
    try:
        checkpoint = write_checkpoint(model_type, folder / "checkpoint")
    except Exception as error:  # noqa: BLE001  # model code can raise anything
        return Result(model_type=model_type, form=form, outcome=BROKEN, reason=_first_line(error))
    started = time.monotonic()
    outcome = _export_result(checkpoint, folder / "export", FORMS[form])
    return Result(model_type=model_type, form=form, seconds=round(time.monotonic() - started, 1), **outcome)


def _export_result(checkpoint: Path, output: Path, options: dict[str, Any]) -> dict[str, Any]:
    from topw_deploy.errors import TopWError, VerificationError
    from topw_deploy.export import export_model
    from topw_deploy.manifest import load_decoder_manifest

    try:
        export_model(checkpoint, output, **options)
    except VerificationError as error:
        return {"outcome": WRONG, "reason": _first_line(error)}
    except TopWError as error:
        return {"outcome": REFUSED, "reason": _first_line(error).replace(str(checkpoint), "the folder")}
    except Exception as error:  # noqa: BLE001  # an unexpected error is a result too
        return {"outcome": FAILED, "reason": f"{type(error).__name__}: {_first_line(error)}"}
    manifest = load_decoder_manifest(output)
    checks = manifest.verification.checks
    return {
        "outcome": EXPORTED if all(check.passed for check in checks) else WRONG,
        "status": manifest.verification.status,
        "states": states_of(manifest),
        "context": manifest.decoder.context_length,
        "difference": max(check.difference for check in checks if check.name.endswith("logits")),
        "reason": "; ".join(f"{check.name} {check.difference:.2g}" for check in checks if not check.passed),
    }


def states_of(manifest: Any) -> dict[str, int]:
    """Kind of state -> number of layers that have one."""
    return dict(Counter(kind for _, kind in {(state.layer, state.kind) for state in manifest.decoder.states}))


def _first_line(error: BaseException) -> str:
    from topw_deploy.errors import one_line

    return one_line(error, 400)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(asdict(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))), flush=True)
