"""`python -m benchmarks` runs every measurement that needs nothing but the [dev] extra, one after the other.

What needs a peer's files is run by itself: `transformers_generate` and `parity_released` (the authors' processor),
`export_cost --optimum` (an environment with optimum).
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import say

MODULES = ("tail", "native_rows", "decode", "kv", "startup", "export_cost", "graft_memory", "geometry_share", "lively")


def main() -> None:
    for module in MODULES:
        say(f"== {module}")
        print(f"\n## {module}\n", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}"], check=True)


if __name__ == "__main__":
    main()
