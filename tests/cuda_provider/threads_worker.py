"""Generations in many threads: `python threads_worker.py FOLDER HOW`, in the environment of worker.py.

HOW "in turn": one model with graphs, and a new thread for each generation.
HOW "at once": two models with graphs and one without, each in four threads.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from worker import counts


def main(folder: str, how: str) -> dict[str, Any]:
    from topw_deploy.runtime import TopWModel

    def opened(graphs: bool) -> TopWModel:
        options = {"enable_cuda_graph": "1"} if graphs else {}
        return TopWModel.from_pretrained(folder, provider="cuda", provider_options=options)

    errors: list[str] = []

    def generate(model: TopWModel, rows: int, times: int) -> None:
        try:
            for extra in range(times):
                model.generate([[1, 5, 6, 7, 9]] * rows, max_new_tokens=6 + extra, seed=3, ignore_eos=True)
        except Exception as error:  # noqa: BLE001  # the test shows it
            errors.append(str(error))

    if how == "in turn":
        model = opened(graphs=True)
        for _ in range(6):
            run([lambda: generate(model, 2, 1)])
    else:
        models = [opened(graphs=True), opened(graphs=False), opened(graphs=True)]
        run([lambda m=m, rows=rows: generate(m, rows, 4) for m in models for rows in (1, 2, 3, 4)])
    return {**counts(), "errors": errors}


def run(work: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=function) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2])) + "\n")
