"""The child process of a part: `python -m benchmarks.gpu.worker PART JOB`, started by `children.py`.

It lists its steps, then runs those requested by JSON lines on stdin. It writes events to the file descriptor
TOPW_EVENTS.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

from benchmarks.gpu.job import Job, MissingError, Result, Step, result_json, steps_of

EVENTS = "TOPW_EVENTS"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main() -> int:
    part, given = sys.argv[1:]
    with suppress(AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    job = Job.from_json(given)
    with os.fdopen(int(os.environ.pop(EVENTS)), "w", encoding="utf-8") as events:

        def tell(**event: Any) -> None:
            print(json.dumps(event), file=events, flush=True)

        steps = {step.name: step for step in steps_of(part, job)}
        tell(plan=[[s.name, s.seconds, s.longest, list(s.inputs)] for s in steps.values()])
        for line in sys.stdin:
            asked = json.loads(line)
            job.earlier, job.end = asked["earlier"], asked["end"]
            job.keep = lambda data: tell(kept=data)
            started = time.monotonic()
            result = run(steps[asked["step"]], job)
            tell(result=result_json(result), seconds=time.monotonic() - started)
    return 0


def run(step: Step, job: Job) -> Result:
    """The step's result; an exception is a failure."""
    try:
        return step.run(job)
    except MissingError as error:
        return Result(failed=str(error))
    except Exception as error:  # noqa: BLE001 - any error is the step's result
        traceback.print_exc()
        return Result(failed=f"{type(error).__name__}: {error}"[:2000])


if __name__ == "__main__":
    sys.exit(main())
