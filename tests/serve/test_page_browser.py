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


@pytest.fixture(scope="module")
def seen(address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What page.mjs saw in one visit."""
    found: dict[str, Any] = run_node(SCRIPT, address, KEY, str(tmp_path_factory.mktemp("screenshots")))
    return found


Seen = dict[str, Any]


def test_the_page_has_no_errors_and_loads_nothing_from_elsewhere(seen: Seen) -> None:
    assert seen["errors"] == []
    assert seen["outside"] == []


def test_every_control_has_a_name_and_every_id_is_unique(seen: Seen) -> None:
    assert seen["unnamed"] == []
    assert seen["duplicates"] == 0


def test_every_view_passes_the_accessibility_audit(seen: Seen) -> None:
    assert set(seen["audits"]) == {"key", "desktop", "compare", "phone", "dark", "chat"}
    for name, audit in seen["audits"].items():
        assert audit["violations"] == [], name
        assert {"color-contrast", "label", "target-size", "heading-order"} <= set(audit["passed"]), name


def test_a_wrong_key_is_refused_and_the_right_one_stays_in_the_tabs_storage(seen: Seen) -> None:
    assert seen["asks"]
    (bad, where), (wrong, here) = seen["wrong"]
    assert "cannot be a key" in bad
    assert "does not accept" in wrong
    assert where == here == "key"
    assert seen["stored"] == [["topw-key"], [], ""], "in neither localStorage nor a cookie"


def test_the_keyboard_alone_generates_a_text_and_moves_along_its_tokens(seen: Seen) -> None:
    assert seen["focusStays"] == "prompt"
    assert seen["arrow"] == ["1", "true"]
    assert seen["tokens"] == 48
    assert seen["text"].startswith("class Path")
    assert "token geo" in seen["classes"]


def test_a_screen_reader_reads_the_text_but_not_each_token(seen: Seen) -> None:
    assert 2 <= seen["announced"] < 24


def test_a_token_is_explained_by_its_kept_sets_and_a_map_of_the_tokens(seen: Seen) -> None:
    assert seen["drawn"] == ["drawn kept"], "the drawn token is in the kept set"
    assert seen["lead"].startswith("Top-W kept ")
    assert "Distances between tokens" in seen["lead"]
    assert seen["rules"] == ["Top-W", "Top-W without distances", "top_p 0.9", "min_p 0.1", "top_h 0.4"]
    assert seen["axes"] == ["first principal coordinate", "second principal coordinate"]
    assert 3 <= seen["shown"] <= 60


def test_two_settings_answer_side_by_side_with_the_same_seed(seen: Seen) -> None:
    assert seen["titles"] == ["A: Top-W lively", "B: Top-W, the export's defaults"]
    assert seen["seeds"] == ["seed 2", "seed 2"]
    assert seen["texts"][0] != seen["texts"][1]
    assert "certified" in seen["certified"]


def test_the_button_and_the_escape_key_stop_an_answer(seen: Seen) -> None:
    assert len(seen["stopped"]) == 2
    assert all(facts.startswith("stopped after ") for facts in seen["stopped"])


def test_every_number_of_every_rule_has_a_slider(seen: Seen) -> None:
    penalties, limits = 3, 2
    assert seen["sliders"] == {
        name: (6 if name == "top_w" else 2 + len(rule.values)) + penalties + limits for name, rule in RULES.items()
    }
    assert seen["length"] == ["49", "49"], "an arrow key moves the slider from 48"


def test_the_slider_of_beta_shows_its_value_at_the_chosen_temperature(seen: Seen) -> None:
    assert seen["creative"] == ["1.5+1.5*T", 4.5], "at temperature 2"
    assert seen["beta"] == ["1.5 + .5*T", 2.25], "at 1.5"


def test_a_beta_that_is_no_expression_is_refused_at_its_field(seen: Seen) -> None:
    message, focused = seen["badBeta"]
    assert message.startswith('beta is "2x"; give a number, or A+B*T')
    assert focused == "beta-A"


def test_another_unit_of_geom_scale_converts_its_value_and_a_preset_resets_it(seen: Seen) -> None:
    raw, per_median, again = seen["scales"]
    assert per_median / raw == pytest.approx(MEDIAN, rel=1e-3)
    assert again == pytest.approx(raw, rel=1e-3)
    assert seen["reset"] == "raw"


def test_every_field_of_the_form_is_sent_and_named_above_the_answer(seen: Seen) -> None:
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


def test_nothing_is_wider_than_a_phone_or_than_a_window_at_200_percent(seen: Seen) -> None:
    assert seen["widths"] == [360, 640]
    assert seen["inSight"], "the explanation of a token that was tapped"


def test_colours_have_the_contrast_of_wcag_in_both_schemes(seen: Seen) -> None:
    for scheme in ("light", "dark"):
        assert seen["contrast"][scheme]["text"] >= 4.5, "WCAG 2.2 AA, 1.4.3"
        assert seen["contrast"][scheme]["control"] >= 3, "WCAG 2.2 AA, 1.4.11"


def test_nothing_moves_where_reduced_motion_is_preferred(seen: Seen) -> None:
    assert seen["motion"] == "0s"


def test_a_model_without_logits_shows_how_many_tokens_it_kept(seen: Seen) -> None:
    assert "--with-logits" in seen["without"]
    assert "tokens kept" in seen["without"]


def test_a_chat_keeps_its_turns_and_draws_the_last_answer_again_with_a_new_seed(seen: Seen) -> None:
    one, two, again = seen["turns"]
    assert one == ["user: Hi"]
    first, answer, second = two
    assert (first, second) == ("user: Hi", "user: Yo")
    assert answer.startswith("assistant: ")
    assert again == two
    assert seen["again"] != "2"


def test_a_prompt_stays_in_its_field_when_the_server_cannot_be_reached(seen: Seen) -> None:
    message, prompt = seen["away"]
    assert "cannot be reached" in message
    assert prompt == "Still there?"


def test_a_model_without_a_chat_template_has_no_chat(seen: Seen) -> None:
    disabled, note_hidden = seen["noChat"]
    assert disabled
    assert not note_hidden


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
