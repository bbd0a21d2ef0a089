"""The bundled model draws the same tokens under onnxruntime-node and in the browser as in Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import FOLDER, ROOT, needs_browser, run_node
from tests.web.cases import CASES, WRONG, Case, by_node, case, differences, drive, opened, write_cases
from topw_deploy.web import site as sites
from topw_deploy.web import write_site

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
IN_A_BROWSER = (*CASES[::4], *WRONG[:2])
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
THREADS = min(4, os.cpu_count() or 1)
TEXTS = (
    "hello world",
    "",
    "naïve 😀 漢字\u200d",
    "  def f(x):\n\treturn x\r\n",
    "<|end_of_text|> a<|pad|>",
    "'s 123 --",
)


@pytest.fixture(scope="module")
def site(demo_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_browser()
    folder = tmp_path_factory.mktemp("site") / "site"
    write_site(demo_export, folder, runtime=FOLDER, prompt="class Path")
    return folder


def as_json(cases: tuple[Case, ...], tmp_path: Path) -> Any:
    return json.loads(write_cases(cases, tmp_path / "cases.json").read_text("utf-8"))


@pytest.mark.parametrize("where", ["node", "browser"])
def test_every_rule_and_parameter_gives_pythons_tokens(
    where: str, demo_export: Path, site: Path, tmp_path: Path
) -> None:
    cases = (*CASES, *WRONG) if where == "node" else IN_A_BROWSER
    if where == "node":
        answers = by_node(demo_export, cases, tmp_path)
    else:
        found = drive(site, tmp_path, requests=as_json(cases, tmp_path))
        answers = found["results"]
        assert (found["outside"], found["complaints"]) == ([], [])
    for sampler in ("graph", "native") if where == "node" else ("native",):
        with opened(demo_export, sampler) as model:
            assert not differences(model, cases, answers), sampler


def test_a_pool_that_the_graph_cannot_sort_is_refused_as_in_python(demo_export: Path, tmp_path: Path) -> None:
    cases = [case(top_h=0.6, top_h_pool=pool, max_new_tokens=4) for pool in (3840, 3841, 4096)]
    answers = by_node(demo_export, cases, tmp_path)
    with opened(demo_export) as model:
        assert not differences(model, cases, answers)
    assert [isinstance(answer, dict) for answer in answers] == [False, True, False]


def test_texts_are_encoded_and_decoded_as_in_python(demo_export: Path, tmp_path: Path) -> None:
    corpus = (ROOT / "docs" / "guide" / "runtime.md").read_text(encoding="utf-8")
    texts = [*TEXTS, *(corpus[start : start + 500] for start in range(0, len(corpus), 500))]
    (tmp_path / "texts.json").write_text(json.dumps([{"texts": texts}]), encoding="utf-8")
    (found,) = run_node(HERE / "requests.mjs", str(demo_export), str(tmp_path / "texts.json"))
    with opened(demo_export) as model:
        ids = [model.tokenizer.encode(text) for text in texts]
        assert found["ids"] == ids
        assert found["decoded"] == [model.tokenizer.decode(each) for each in ids]


def test_the_page_generates_what_was_asked_for(demo_export: Path, site: Path, tmp_path: Path) -> None:
    form = {"prompt": "class Path", "preset": "lively", "seed": "18446744073709551615", "max_new_tokens": "20"}
    found = drive(site, tmp_path, form=form, viewport={"width": 390, "height": 800}, pictures=str(tmp_path))
    with opened(demo_export) as model:
        result = model.generate("class Path", preset="lively", seed=2**64 - 1, max_new_tokens=20)
    page = found["page"]
    assert page["text"] == "class Path" + result.text
    assert page["seed"] == "18446744073709551615"
    assert [int(row[3]) for row in page["table"]] == result.kept
    assert [row[4] == "yes" for row in page["table"]] == result.certified
    assert page["certified"] == f"{100 * result.certified_share:.0f} %"
    assert (found["outside"], found["complaints"], found["overflow"], page["unlabelled"]) == ([], [], 0, [])


def test_libraries_from_the_cdn_run_with_threads_and_need_their_hashes(demo_export: Path, tmp_path: Path) -> None:
    needs_browser()
    folder = tmp_path / "site"
    write_site(demo_export, folder)
    form = {"prompt": "import", "seed": "3", "max_new_tokens": "24"}
    found = drive(folder, tmp_path, form=form, cdn=str(FOLDER / "node_modules"), headers=ISOLATED)
    assert found["page"]["status"].startswith("Done: ")
    assert f"Ready: {THREADS} thread" in found["opened"]
    with opened(demo_export) as model:
        assert (
            found["page"]["text"]
            == "import" + model.generate("import", preset="lively", seed=3, max_new_tokens=24).text
        )
    assert set(found["outside"]) == {file.url for file in sites.FILES}
    broken = drive(folder, tmp_path, cdn=str(FOLDER / "node_modules"), broken="tokenizers.min.mjs")
    assert "cannot be fetched with the hash sha384-" in broken["opened"]


def test_the_example_prints_what_python_generates(demo_export: Path, tmp_path: Path) -> None:
    needs_browser()
    here = tmp_path / "examples" / "node"
    shutil.copytree(ROOT / "examples" / "node", here, ignore=shutil.ignore_patterns("node_modules"))
    (here / "node_modules").symlink_to(FOLDER / "node_modules")
    (tmp_path / "src").symlink_to(ROOT / "src")

    def generate(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["node", str(here / "generate.js"), str(demo_export), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    given = ["--seed", str(2**64 - 1), "--preset", "lively", "--max-new-tokens", "12"]
    with opened(demo_export) as model:
        one = model.generate("class Path", seed=2**64 - 1, preset="lively", max_new_tokens=12)
        two = model.generate(["a", "b c"], seed=1, top_k=5, max_new_tokens=5, stop_token_ids=[13])
    assert generate("class Path", *given).stdout == one.text + "\n"
    answer = json.loads(generate("class Path", *given, "--json").stdout)
    assert (answer["token_ids"], answer["seed"], answer["kept"]) == (one.token_ids, one.seed, one.kept)
    words = ("a", "b c", "--seed", "1", "--top-k", "5", "--max-new-tokens", "5", "--stop-token-ids", "[13]", "--json")
    lines = generate(*words).stdout.splitlines()
    assert [json.loads(line)["token_ids"] for line in lines] == [result.token_ids for result in two]
    wrong = generate("a", "--temperature", "-1")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == "Error: temperature is -1, but must be a finite number >= 0.\n"
