"""`python -m benchmarks` runs every measurement that needs only the extra [dev].

Excludes `transformers_generate` and `parity_released`, which need the authors' file, `sums`, which needs its trained
model, and `coverage`, which takes hours.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import say

MODULES = (
    *("function", "native_rows", "decode", "kv", "experts", "startup", "export_cost", "graft_memory", "geometry_share"),
    *("serve", "lively", "masks", "rules"),
)


def main() -> None:
    for module in MODULES:
        say(f"== {module}")
        print(f"\n## {module}\n", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}"], check=True)


if __name__ == "__main__":
    main()
