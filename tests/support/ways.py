"""The four calls whose modules `house.py --ways` counts: an export, a generation, an engine's request and a chat."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from starlette.testclient import TestClient

from topw_deploy import Engine, TopWModel, export_model
from topw_deploy.export import traced_decoder  # noqa: F401  # imported before the count: a class's body is no call
from topw_deploy.serve.app import create_app
from topw_deploy.serve.service import ServeOptions


def calls(folder: Path, place: Path) -> dict[str, Callable[[], object]]:
    """The calls on the export `folder`, which write to `place`. The engine and the server have started."""
    model = TopWModel.from_pretrained(folder)
    engine = Engine(model, max_batch=2)
    ways: dict[str, Callable[[], object]] = {
        "export, unverified": lambda: export_model("tiny", place / "out", verify=False),
        "generate": lambda: model.generate("Hello", max_new_tokens=4, seed=1),
        "engine.generate": lambda: engine.submit("Hello", max_new_tokens=4, seed=1).result(),
    }
    if model.has_chat_template:
        client = TestClient(create_app(ServeOptions(models={"m": folder}))).__enter__()
        while client.get("/health").status_code != 200:
            time.sleep(0.1)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}
        ways["POST /v1/chat/completions"] = lambda: client.post("/v1/chat/completions", json=body).raise_for_status()
    return ways
