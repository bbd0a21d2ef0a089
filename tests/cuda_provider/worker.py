"""Generate with the CUDA provider and report the stand-in's calls.

python worker.py FOLDER SETTINGS(json) REQUESTS(json)
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

COUNTS = ("launches", "replays", "captures", "mistakes", "to_device", "to_host")


def counts() -> dict[str, int]:
    numbers = (ctypes.c_long * len(COUNTS))()
    ctypes.CDLL("libcudart.so.13").stand_in_counts(numbers)
    return dict(zip(COUNTS, numbers, strict=True))


def main(folder: str, settings: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, Any]:
    from topw_deploy.errors import TopWError
    from topw_deploy.runtime import TopWModel

    try:
        model = TopWModel.from_pretrained(folder, **settings)
    except TopWError as error:
        return {"error": str(error)}
    nodes = [[node.operator, node.computes] for node in model.cpu_nodes]
    found: dict[str, Any] = {"sampler": model.sampler, "why": model.why_graph, "cpu_nodes": nodes, "runs": []}
    for request in requests:
        before = counts()
        results = model.generate(**request)
        after = counts()
        found["runs"].append(
            {"tokens": [r.token_ids for r in results], **{name: after[name] - before[name] for name in COUNTS}}
        )
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))) + "\n")
