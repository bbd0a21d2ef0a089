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
from tests.support.editing import edit_json
from tests.support.toy_model import Toy, export
from topw_deploy.export import export_model
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
    export_model("tiny", place, verify=False, with_logits=True)
    edit_json(place / MANIFEST_NAME, lambda manifest: manifest["verification"].update(median_distance=MEDIAN))
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


@pytest.fixture(scope="module")
def seen(address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What page.mjs saw in one visit."""
    found: dict[str, Any] = run_node(SCRIPT, address, KEY, str(tmp_path_factory.mktemp("screenshots")))
    return found


@pytest.mark.parametrize(
    ("promise", "field", "expected"),
    [
        ("no errors", "errors", []),
        ("nothing is loaded from elsewhere", "outside", []),
        ("every control has a name", "unnamed", []),
        ("every id is unique", "duplicates", 0),
        ("the key stays in the tab's storage, not in localStorage or a cookie", "stored", [["topw-key"], [], ""]),
        ("the field keeps the focus", "focusStays", "prompt"),
        ("the keyboard moves along the tokens", "arrow", ["1", "true"]),
        ("the keyboard alone generates a text", "tokens", 48),
        ("the drawn token is in the kept set", "drawn", ["drawn kept"]),
        ("rules", "rules", ["Top-W", "Top-W without distances", "top-p 0.9", "min-p 0.1", "Top-H 0.4"]),
        ("a map of the tokens", "axes", ["first principal coordinate", "second principal coordinate"]),
        ("two settings side by side", "titles", ["A: Top-W lively", "B: Top-W, the export's defaults"]),
        ("with the same seed", "seeds", ["seed 2", "seed 2"]),
        ("an arrow key moves the slider from 48", "length", ["49", "49"]),
        ("beta at temperature 2", "creative", ["1.5+1.5*T", 4.5]),
        ("beta at temperature 1.5", "beta", ["1.5 + .5*T", 2.25]),
        ("a preset resets the unit of geom_scale", "reset", "raw"),
        ("nothing is wider than a phone or than a window at 200 percent", "widths", [360, 640]),
        ("reduced motion", "motion", "0s"),
        ("without a chat template there is no chat, and a note says so", "noChat", [True, False]),
    ],
)  # fmt: skip
def test_the_page_keeps_its_promises(seen: dict[str, Any], promise: str, field: str, expected: Any) -> None:
    assert seen[field] == expected, promise


def test_every_view_passes_the_accessibility_audit(seen: dict[str, Any]) -> None:
    assert set(seen["audits"]) == {"key", "desktop", "compare", "phone", "dark", "chat"}
    for name, audit in seen["audits"].items():
        assert audit["violations"] == [], name
        assert {"color-contrast", "label", "target-size", "heading-order"} <= set(audit["passed"]), name
    for scheme in ("light", "dark"):
        assert seen["contrast"][scheme]["text"] >= 4.5, "WCAG 2.2 AA, 1.4.3"
        assert seen["contrast"][scheme]["control"] >= 3, "WCAG 2.2 AA, 1.4.11"
    assert 2 <= seen["announced"] < 24, "a screen reader reads the text but not each token"
    assert seen["inSight"], "the explanation of a token that was tapped"


def test_wrong_keys_values_and_models_are_answered_in_words(seen: dict[str, Any]) -> None:
    assert seen["asks"]
    (bad, where), (wrong, here) = seen["wrong"]
    assert "cannot be a key" in bad
    assert "does not accept" in wrong
    assert where == here == "key"
    message, focused = seen["badBeta"]
    assert message.startswith('beta is "2x"; give a number, or A+B*T')
    assert focused == "beta-A"
    assert "--with-logits" in seen["without"]
    assert "tokens kept" in seen["without"]
    message, prompt = seen["away"]
    assert "cannot be reached" in message
    assert prompt == "Still there?"


def test_a_text_and_its_tokens_are_explained_and_stopped(seen: dict[str, Any]) -> None:
    assert seen["text"].startswith("class Path")
    assert "token geo" in seen["classes"]
    assert seen["lead"].startswith("Top-W kept ")
    assert "Distances between tokens" in seen["lead"]
    assert 3 <= seen["shown"] <= 60
    assert seen["texts"][0] != seen["texts"][1]
    assert "certified" in seen["certified"]
    assert len(seen["stopped"]) == 2, "by the button and the escape key"
    assert all(facts.startswith("stopped after ") for facts in seen["stopped"])


def test_every_number_of_every_rule_has_a_slider(seen: dict[str, Any]) -> None:
    penalties, limits = 3, 2
    assert seen["sliders"] == {
        name: (6 if name == "top_w" else 2 + len(rule.values)) + penalties + limits for name, rule in RULES.items()
    }
    raw, per_median, again = seen["scales"]
    assert per_median / raw == pytest.approx(MEDIAN, rel=1e-3)
    assert again == pytest.approx(raw, rel=1e-3)


def test_every_field_of_the_form_is_sent_and_named_above_the_answer(seen: dict[str, Any]) -> None:
    assert seen["sent"] == {
        "model": "demo",
        "prompt": "class Path",
        "seed": 2,
        "max_tokens": 49,
        "preset": "lively",
        "temperature": 1.5,
        "beta": "1.5 + .5*T",
        "geom_scale": seen["scales"][1],
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


def test_a_chat_keeps_its_turns_and_draws_the_last_answer_again_with_a_new_seed(seen: dict[str, Any]) -> None:
    one, two, again = seen["turns"]
    assert one == ["user: Hi"]
    first, answer, second = two
    assert (first, second) == ("user: Hi", "user: Yo")
    assert answer.startswith("assistant: ")
    assert again == two
    assert seen["again"] != "2"


def test_the_bundled_model_explains_its_tokens(serve: NewClient, bundled: Path) -> None:
    client = serve(bundled)
    choice = drawn(client, prompt="class Path", preset="lively", seed=2, max_tokens=48)
    changed = 0
    for position, token in enumerate(choice["token_ids"]):
        answer = inspect(client, choice, position, preset="lively", seed=2)
        assert token in {each["id"] for each in answer["tokens"] if "top_w" in each["sets"]}
        assert answer["token"]["kept"]
        assert set_of(answer, "top_w")["kept"] == choice["topw"]["kept"][position]
        assert (answer["plane"] is None) == (sum("top_w" in e["sets"] or "without_distances" in e["sets"]
                                                 for e in answer["tokens"]) < 3)  # fmt: skip
        changed += bool(answer["added"] or answer["dropped"])
    assert changed > 4
