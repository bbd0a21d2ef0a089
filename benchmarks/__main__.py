"""`python -m benchmarks` runs every measurement that needs only the extra [dev].

Excludes `parity_released`, which needs the authors' file, `sums`, which needs its trained
model, and `coverage`, which takes hours.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import say

MODULES = (
    *("function", "native_rows", "decode", "kv", "experts", "export_cost"),
    *("serve", "masks", "rules"),
)


def main() -> None:
    for module in MODULES:
        say(f"== {module}")
        print(f"\n## {module}\n", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}"], check=True)


if __name__ == "__main__":
    main()
