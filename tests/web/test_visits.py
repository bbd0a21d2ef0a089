"""What a visitor of a site sees when loading fails, and that the page's buttons do one thing at a time."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import FOLDER, needs_browser, run_node
from tests.support.editing import edit_json
from tests.support.toy_model import CONTEXT, Toy, export
from topw_deploy.runtime import TopWModel
from topw_deploy.web import write_site

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
MODEL = Path("model", "model.onnx")
TOKENS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("model") / "out", Toy.random(4))


@pytest.fixture(scope="module")
def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_browser()
    folder = tmp_path_factory.mktemp("site") / "site"
    write_site(model, folder, runtime=FOLDER)
    return folder


def state_size(manifest: Path, size: int) -> None:
    edit_json(manifest, lambda data: data["files"]["model.onnx"].update(size=size))


FAULTS: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "missing": (lambda site: (site / MODEL).unlink(), {}, "model.onnx cannot be fetched (status 404); reload the page"),
    "short": (lambda site: os.truncate(site / MODEL, 1000), {}, "by the manifest, but has only 1000; reload the page"),
    "long": (lambda site: os.truncate(site / MODEL, 1 << 22), {}, "by the manifest, but has more; reload the page"),
    "cut": (lambda site: None, {"cut": MODEL.as_posix()}, "model.onnx did not arrive completely"),
    "too large": (
        lambda site: state_size(site / "model" / "topw_manifest.json", 2**53 - 1),
        {},
        "has 9007199254740991 bytes, for which this browser has no memory; close other pages",
    ),
    "no list": (lambda site: (site / "topw_site.json").unlink(), {}, "topw_site.json cannot be read (status 404)"),
    "no manifest": (
        lambda site: (site / "model" / "topw_manifest.json").unlink(),
        {},
        "topw_manifest.json cannot be fetched (status 404)",
    ),
    "no runtime": (
        lambda site: (site / "runtime" / "ort-wasm-simd-threaded.wasm").unlink(),
        {},
        "ort-wasm-simd-threaded.wasm cannot be fetched (status 404); check the connection",
    ),
    "no SIMD": (
        lambda site: None,
        {"flags": ["--js-flags=--no-enable-sse4-1"]},
        "this browser has no WebAssembly with SIMD, which the model needs; use a current browser.",
    ),
    "stopped": (
        lambda site: None,
        {"hold": MODEL.as_posix(), "stop": True},
        "Loading was stopped; reload the page to load the model.",
    ),
}


def test_a_page_that_cannot_load_says_what_to_do(site: Path, tmp_path: Path) -> None:
    visits = []
    for name, (damage, how, _) in FAULTS.items():
        folder = tmp_path / name
        shutil.copytree(site, folder)
        damage(folder)
        visits.append({"site": str(folder), **how})
    (tmp_path / "visits.json").write_text(json.dumps(visits), encoding="utf-8")
    found = run_node(HERE / "visits.mjs", str(tmp_path / "visits.json"))
    for (_, _, message), seen in zip(FAULTS.values(), found, strict=True):
        assert message in seen["status"]
        assert seen["buttons"] == []


def test_a_stopped_text_ends_and_a_second_press_starts_nothing(model: Path, site: Path, tmp_path: Path) -> None:
    form = {"prompt": "ab", "seed": "3", "temperature": "2", "max_new_tokens": str(TOKENS)}
    (tmp_path / "options.json").write_text(json.dumps({"form": form, "stop": True, "twice": True}), encoding="utf-8")
    found = run_node(HERE / "page.mjs", str(site), str(tmp_path / "options.json"))
    with TopWModel.from_pretrained(model, provider="cpu") as opened:
        text = opened.generate("ab", preset="lively", seed=3, temperature=2, max_new_tokens=TOKENS).text
    stopped = re.fullmatch(r"Done: (\d+) tokens?, stopped\.", found["stopped"])
    assert stopped is not None
    assert int(stopped[1]) < TOKENS
    assert found["page"]["text"] == "ab" + text
    assert found["page"]["tokens"] == str(TOKENS)
    assert found["complaints"] == []


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(site: Path, tmp_path: Path) -> None:
    form = {"prompt": "x" * (CONTEXT + 1)}
    (tmp_path / "options.json").write_text(json.dumps({"form": form}), encoding="utf-8")
    found = run_node(HERE / "page.mjs", str(site), str(tmp_path / "options.json"))
    assert f"has {CONTEXT + 1} tokens, the model's context holds {CONTEXT}; shorten it." in found["page"]["status"]
