"""A double of compute-sanitizer for rehearsals: accepts its options, runs the program, reports no errors."""

from __future__ import annotations

import argparse
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", required=True, choices=("memcheck", "racecheck", "synccheck", "initcheck"))
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
