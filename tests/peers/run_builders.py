"""Run the JSON argument's command lines, in the builders' environment.

One process, because importing the tools takes longer than building.
"""

from __future__ import annotations

import json
import runpy
import sys
import time

MODULES = {"optimum": "optimum.exporters.onnx", "genai": "onnxruntime_genai.models.builder", "mobius": "mobius"}


def main() -> None:
    for tool, *words in json.loads(sys.argv[1]):
        started = time.monotonic()
        sys.argv = [tool, *words]
        try:
            runpy.run_module(MODULES[tool], run_name="__main__", alter_sys=False)
        except SystemExit as end:
            if end.code:
                raise
        sys.stderr.write(f"{tool} {' '.join(words)}: {time.monotonic() - started:.1f} s\n")


if __name__ == "__main__":
    main()
