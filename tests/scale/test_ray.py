"""The Ray Serve application on a local Ray: `make ray` makes its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.shared import skip_or_fail
from topw_deploy.serve.metrics import Metrics

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(os.environ.get("TOPW_RAY", ROOT / ".venv-ray")) / "bin"


@pytest.fixture(scope="module")
def seen(demo_export: Path) -> dict[str, Any]:
    """What ray_cluster.py saw."""
    if not (PROGRAMS / "serve").exists():
        skip_or_fail(f"Ray is not in {PROGRAMS}; `make ray` makes the environment")
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, str(Path(__file__).with_name("ray_cluster.py")), str(PROGRAMS), str(demo_export)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_answers_are_those_of_the_model_alone(seen: dict[str, Any]) -> None:
    assert seen["alone"] == [True]
    assert seen["streamed"] == [True]


def test_prompts_that_begin_alike_reach_one_replica(seen: dict[str, Any]) -> None:
    """At random, all seven would reach one replica with a probability of about 1 in 128."""
    assert all(count > 50 for count in seen["prefixes"][1:]), seen["prefixes"]


def test_requests_are_refused_as_by_one_server(seen: dict[str, Any]) -> None:
    assert seen["errors"] == [400, 413, 200, 200, 404, 404]


def test_a_client_that_leaves_ends_its_request(seen: dict[str, Any]) -> None:
    assert "completion_tokens" not in seen["left"], "it was drawn to its end"


def test_a_killed_replica_loses_no_request_without_an_error_and_mixes_none(seen: dict[str, Any]) -> None:
    kinds = [kind for kind, _ in seen["killed"]]
    assert not [outcome for outcome in seen["killed"] if outcome[0] == "lost"]
    assert all(value for _, value in seen["killed"]), "an answer of another request"
    assert kinds.count("text") >= len(kinds) // 2
    assert seen["log"], "no request ran on the killed replica"


def test_the_replica_is_replaced(seen: dict[str, Any]) -> None:
    assert seen["recovered"] == [["text", True]] * len(seen["killed"])


def test_ray_exports_what_the_server_measures(seen: dict[str, Any]) -> None:
    """All of the server's own metrics but the count of HTTP answers, which Ray has itself."""
    registry = Metrics(lambda: ()).registry
    own = {each.name.replace(":", "_"): each.type for each in registry.collect()}
    own.pop("topw_http_responses", None)
    ends = {"histogram": "_bucket", "counter": "_total", "gauge": ""}
    unused = {"topw_failed_requests", *(name for name in own if "spec_decode" in name)}  # none failed or was drafted
    wanted = {f"{name}{ends[kind]}" for name, kind in own.items() if name not in unused}
    assert wanted <= set(seen["metrics"]), wanted - set(seen["metrics"])


def test_replicas_are_added_and_removed_by_waiting_requests(seen: dict[str, Any]) -> None:
    scaled = seen["scaled"]
    assert len(scaled["burst"]) >= 16
    assert all(outcome == ["text", True] for outcome in scaled["burst"])
    assert len(scaled["removed"]) == 1


def test_a_removed_replica_ends_its_streams(seen: dict[str, Any]) -> None:
    """A few of the many tokens may be drawn differently, as a step of fewer rows can round a logit differently."""
    streams = seen["scaled"]["streams"]
    assert all(kind == "text" and share >= 0.8 for kind, share, _, _ in streams), streams
    drained = [later for _, _, process, later in streams if process in seen["scaled"]["removed"]]
    assert any(drained), streams
