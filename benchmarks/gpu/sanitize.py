"""The part `sanitize`: rows of every kind under compute-sanitizer's four tools.

A tool that cannot run here (some virtual machines forbid it) is recorded as absent, with its output.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.gpu.build import find_tool
from benchmarks.gpu.job import Job, Result, Step

READY, ANSWERED = "READY", "ANSWERED"  # output of small_rows, which only the child imports
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_FOUND = 97  # compute-sanitizer's exit code for an error
_LONGEST = 100.0  # seconds per tool
_QUOTED = 12  # lines
_USUAL = Path("/usr/local/cuda/compute-sanitizer/compute-sanitizer")
_SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


def steps(job: Job) -> list[Step]:
    alone = Step("rows without a tool", run_without_tool, 20, 120)
    return [alone, *(Step(name, partial(run_under_tool, name=name), 45, _LONGEST + 20) for name in TOOLS)]


def command(job: Job) -> list[str]:
    """The command line of the program that runs under the tools."""
    words = [sys.executable, "-m", "benchmarks.gpu.small_rows", str(job.kernels())]
    return [*words, "--emulated"] if job.rehearse else words


def run_without_tool(job: Job) -> Result:
    """Run the rows without a tool. Fails if an answer is wrong."""
    code, said = run_limited(command(job))
    if code != 0 or ANSWERED not in said:
        return Result(
            failed=f"the rows ended with {_describe_exit(code)} before any tool watched: {_last_messages(said)}"
        )
    return Result({"said": said.splitlines()[-1]}, said.splitlines()[-1])


def run_under_tool(job: Job, name: str) -> Result:
    """Run the program under the tool `name`, and keep the output in NAME.txt."""
    program = sanitizer(job)
    if program is None:
        return Result(absent=(f"compute-sanitizer is missing on this machine: {name} was not run",))
    options = ["--tool", name, "--error-exitcode", str(_FOUND), "--print-limit", "20"]
    code, said = run_limited([*program, *options, *command(job)])
    log = job.folder("sanitize") / f"{name}.txt"
    log.write_text(said, encoding="utf-8")
    return verdict(name, code, said)


def sanitizer(job: Job) -> list[str] | None:
    if job.rehearse:
        return [sys.executable, "-m", "benchmarks.gpu.sanitize"]
    found = find_tool("compute-sanitizer") or (str(_USUAL) if _USUAL.is_file() else None)
    return None if found is None else [found]


def verdict(name: str, code: int | None, said: str) -> Result:
    """The result of a tool.

    code: the exit code; None if the tool was killed at its limit.
    said: the output.
    """
    counts = [int(count) for count in _SUMMARY.findall(said)]
    lines = said.splitlines()
    if READY not in lines:  # no allocation: the tool or the driver refuses
        messages = [line.strip("= ") for line in lines if line.startswith("=====")]
        return Result(absent=(f"{name} could not run: {' / '.join([*messages[1:5], _last_messages(said)])}",))
    if code is None:
        return Result(failed=f"{name} did not end within {_LONGEST:.0f} s: {_last_messages(said)}")
    errors = sum(counts)
    data = {"exit code": code, "errors": errors, "said": lines[-_QUOTED:]}
    if code == _FOUND or errors:
        return Result(data, failed=f"{name} found {errors} errors: {_first_errors(lines)}")
    if not counts:
        return Result(
            absent=(
                f"{name} could not run: it ended with {_describe_exit(code)} and no summary: {_last_messages(said)}",
            )
        )
    if code != 0 or not any(line.startswith(ANSWERED) for line in lines):
        return Result(data, failed=f"under {name} the rows ended with {_describe_exit(code)}: {_last_messages(said)}")
    return Result(data, f"no errors; {next(line for line in lines if line.startswith(ANSWERED))}")


def _first_errors(lines: list[str]) -> str:
    messages = [line.strip("= ").strip() for line in lines if line.startswith("=====")]
    return " / ".join(line for line in messages[1 : 1 + _QUOTED] if line)[:1500]


def _last_messages(said: str) -> str:
    messages = [line.strip("= ").strip() for line in said.splitlines() if line.strip("= ").strip()]
    return " / ".join(messages[-2:])[-800:] or "it printed nothing"


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "no exit code: it was killed"
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def run_limited(words: list[str]) -> tuple[int | None, str]:
    """Returns (exit code, output); the code is None if the process group was killed at the limit."""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", process_group=0
    )
    try:
        said, _ = process.communicate(timeout=_LONGEST)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate(timeout=30)
        return None, said


def main() -> int:
    """Stand in for compute-sanitizer in rehearsals: accept its options, run the program, report no errors."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tool", required=True, choices=TOOLS)
    parser.add_argument("--error-exitcode", type=int, required=True)
    parser.add_argument("--print-limit", type=int)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    print("========= COMPUTE-SANITIZER (REHEARSAL: a stand-in that looks for nothing)", flush=True)
    code = subprocess.run(given.program).returncode
    if given.tool == "racecheck":
        print("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
    else:
        print("========= ERROR SUMMARY: 0 errors")
    return code


if __name__ == "__main__":
    sys.exit(main())
