"""Models with other states, in float16, and with weights in several files draw Python's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import FOLDER, needs_browser, run_node
from tests.support.hybrid_models import HYBRIDS, make_hybrid
from tests.support.samples import broad
from tests.support.tiny_models import export, make_model, write_tokenizer
from tests.web.cases import by_node, case, differences, opened, shared_start, write_cases
from topw_deploy.manifest import load_decoder_manifest
from topw_deploy.web import write_site

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
WORDS = "a list of the words in the string "
CASES = [
    case("def parse(text): return", seed=2, max_new_tokens=40, ignore_eos=True),
    case(WORDS * 6, preset="lively", temperature=1.3, max_new_tokens=30),
    case([WORDS, "def", "x"], seed=[1, 2, 3], max_new_tokens=[20, 30, 5], top_p=[None, 0.9, None]),
    case("d", n=2, temperature=0.7),
]
# Family -> settings of the export. The first has convolutions and recurrences.
KINDS: dict[str, dict[str, Any]] = {"qwen3_5_text": {"max_shard_size": "32KB"}, "llama_untied": {"dtype": "fp16"}}
BROAD = ("lfm2", "falcon_h1", "granitemoehybrid", "qwen3_next", "mamba2", "kimi_linear", "gemma3", "qwen3_moe")


@pytest.fixture(scope="module", params=[*KINDS, *map(broad, BROAD)])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_browser()
    folder, settings = tmp_path_factory.mktemp("kind"), KINDS.get(request.param, {})
    model = make_hybrid(request.param) if request.param in HYBRIDS else make_model(request.param)
    model.save_pretrained(folder / "checkpoint")
    write_tokenizer(folder / "checkpoint")
    export(folder / "checkpoint", folder / "out", **settings)
    manifest = load_decoder_manifest(folder / "out")
    assert sum("-of-" in name for name in manifest.files) > 2 or "max_shard_size" not in settings
    assert manifest.decoder.kv_dtype == ("float16" if "dtype" in settings else "float")
    return folder / "out"


@pytest.mark.parametrize("where", ["node", "browser"])
def test_every_kind_of_model_gives_pythons_tokens(where: str, exported: Path, tmp_path: Path) -> None:
    if where == "node":
        answers = by_node(exported, CASES, tmp_path)
    else:
        requests = write_cases(CASES, tmp_path / "cases.json")
        write_site(exported, tmp_path / "site", runtime=FOLDER)
        (tmp_path / "options.json").write_text(json.dumps({"requests": json.loads(requests.read_text("utf-8"))}))
        answers = run_node(HERE / "page.mjs", str(tmp_path / "site"), str(tmp_path / "options.json"))["results"]
    for sampler in ("graph", "native"):
        with opened(exported, sampler) as model:
            if model.manifest.decoder.kv_dtype == "float":
                assert not differences(model, CASES, answers), sampler
                continue
            # Logits are rounded to 11 bits, so a token may differ where the uniform number is near a boundary.
            same, farthest = shared_start(model, CASES, answers)
            assert same > 0.7, sampler
            assert farthest < 0.02, sampler
