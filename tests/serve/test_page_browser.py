"""The page in a headless Chromium, over a server in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import TEMPLATE, NewClient
from tests.serve.test_page import drawn, inspect, set_of
from tests.support.browser import needs_browser, run_node
from tests.support.toy_model import Toy, export
from topw_deploy.export import ExportRequest, export_model
from topw_deploy.export.request import SamplerOptions
from topw_deploy.manifest import MANIFEST_NAME
from topw_deploy.sampling.rules import RULES

pytestmark = pytest.mark.long

KEY = "sk-page"
MEDIAN = 20.0
SCRIPT = Path(__file__).parents[1] / "browser" / "page.mjs"


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with logits, and a median distance in place of the one that a verification measures."""
    place = tmp_path_factory.mktemp("page") / "demo"
    sampler = SamplerOptions(with_logits=True)
    export_model(ExportRequest(model="demo", output=place, verify=False, sampler=sampler))
    manifest = json.loads((place / MANIFEST_NAME).read_text("utf-8"))
    manifest["verification"]["median_distance"] = MEDIAN
    (place / MANIFEST_NAME).write_text(json.dumps(manifest), "utf-8")
    return place


@pytest.fixture(scope="module")
def address(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the bundled model, and of a chat model without logits."""
    needs_browser()
    chat = tmp_path_factory.mktemp("page") / "chat"
    export(chat, Toy.random(3), form="grouped", chat_template=TEMPLATE)
    words = [sys.executable, "-m", "topw_deploy", "serve", str(bundled), str(chat), "--port", "0"]
    server = subprocess.Popen([*words, "--api-key", KEY, "--threads", "1"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    facts: dict[str, Any] = {}
    while facts.get("event") != "opened" or facts["model"] != "chat":  # the last one
        facts = {**facts, **json.loads(server.stderr.readline())}
    yield facts["address"]
    server.terminate()
    server.communicate()


def test_the_page_as_its_users_see_it(address: str, tmp_path: Path) -> None:
    seen = run_node(SCRIPT, address, KEY, str(tmp_path))
    assert seen["errors"] == []
    assert seen["outside"] == []
    assert seen["unnamed"] == []
    assert seen["duplicates"] == 0
    assert set(seen["audits"]) == {"key", "desktop", "compare", "phone", "dark", "chat"}
    for name, audit in seen["audits"].items():
        assert audit["violations"] == [], name
        assert {"color-contrast", "label", "target-size", "heading-order"} <= set(audit["passed"]), name

    assert seen["asks"]
    (bad, where), (wrong, here) = seen["wrong"]
    assert "cannot be a key" in bad
    assert "does not accept" in wrong
    assert where == here == "key"
    assert seen["stored"] == [["topw-key"], [], ""], "the key is in the tab's storage alone"

    assert seen["focusStays"] == "prompt"
    assert seen["arrow"] == ["1", "true"]
    assert seen["tokens"] == 48
    assert seen["text"].startswith("class Path")
    assert 2 <= seen["announced"] < 24, "a screen reader is told of the text, but not of each token"
    assert "token geo" in seen["classes"]

    assert seen["drawn"] == ["drawn kept"], "the drawn token is in the kept set"
    assert seen["lead"].startswith("Top-W kept ")
    assert "Distances between tokens" in seen["lead"]
    assert seen["rules"] == ["Top-W", "Top-W without distances", "top_p 0.9", "min_p 0.1", "top_h 0.4"]
    assert seen["axes"] == ["first principal coordinate", "second principal coordinate"]
    assert 3 <= seen["shown"] <= 60

    assert seen["titles"] == ["A: Top-W lively", "B: Top-W, the export's defaults"]
    assert seen["seeds"] == ["seed 2", "seed 2"]
    assert seen["texts"][0] != seen["texts"][1]
    assert "certified" in seen["certified"]
    assert all(facts.startswith("stopped after ") for facts in seen["stopped"])
    penalties, limits = 3, 2
    assert seen["sliders"] == {
        name: (6 if name == "top_w" else 2 + len(rule.values)) + penalties + limits for name, rule in RULES.items()
    }
    assert seen["creative"] == ["1.5+1.5*T", 4.5], "the slider shows beta at temperature 2"
    raw, per_median, again = seen["scales"]
    assert per_median / raw == pytest.approx(MEDIAN, rel=1e-3)
    assert again == pytest.approx(raw, rel=1e-3)
    assert seen["badBeta"][0].startswith('beta is "2x"; give a number, or A+B*T')
    assert seen["badBeta"][1] == "beta-A"
    assert seen["beta"] == ["1.5 + .5*T", 2.25]
    assert seen["length"] == ["49", "49"], "an arrow key moves the slider from 48"
    assert seen["sent"] == {
        "model": "demo",
        "prompt": "class Path",
        "seed": 2,
        "max_tokens": 49,
        "preset": "lively",
        "temperature": 1.5,
        "beta": "1.5 + .5*T",
        "geom_scale": per_median,
        "geom_unit": "median",
        "min_tokens": 6,
        "no_repeat_ngram_size": 3,
        "stop": ["zz\nz", "qq\\"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    assert sorted(seen["limited"].split(", ")) == sorted([
        "Top-W lively", "geom_scale 1.326 per median distance", "beta 1.5 + .5*T", "temperature 1.5", "min_tokens 6",
        "no_repeat_ngram_size 3", r'stop "zz\nz" "qq\\"',
    ])  # fmt: skip
    assert seen["reset"] == "raw", "a preset brings its own"

    assert seen["widths"] == [360, 640], "nothing is wider than a phone, or than a window at 200 %"
    assert seen["inSight"]
    for scheme in ("light", "dark"):
        assert seen["contrast"][scheme]["text"] >= 4.5, "WCAG 2.2 AA, 1.4.3"
        assert seen["contrast"][scheme]["control"] >= 3, "WCAG 2.2 AA, 1.4.11"
    assert seen["motion"] == "0s"

    assert "--with-logits" in seen["without"]
    assert "tokens kept" in seen["without"]
    assert seen["turns"][0] == ["user: Hi"]
    first, answer, second = seen["turns"][1]
    assert (first, second) == ("user: Hi", "user: Yo")
    assert answer.startswith("assistant: ")
    assert seen["turns"][2] == seen["turns"][1]
    assert seen["again"] != "2"
    assert "cannot be reached" in seen["away"][0]
    assert seen["away"][1] == "Still there?"
    assert seen["noChat"] == [True, False]


def test_the_bundled_model_explains_its_tokens(serve: NewClient, bundled: Path) -> None:
    client = serve(bundled)
    choice = drawn(client, prompt="class Path", preset="lively", seed=2, max_tokens=48)
    changed = 0
    for position, token in enumerate(choice["token_ids"]):
        answer = inspect(client, choice, position, preset="lively", seed=2)
        assert token in {each["id"] for each in answer["tokens"] if "top_w" in each["sets"]}
        assert answer["token"]["redrawn"] == token
        assert set_of(answer, "top_w")["kept"] == choice["topw"]["kept"][position]
        assert (answer["plane"] is None) == (sum("top_w" in e["sets"] or "without_distances" in e["sets"]
                                                 for e in answer["tokens"]) < 3)  # fmt: skip
        changed += bool(answer["added"] or answer["dropped"])
    assert changed > 4
