"""Every form of cache draws the tokens of the Python runtime, under Node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.toy_model import Toy, byte_ids, export
from tests.web.cases import by_node, case, differences, opened
from topw_deploy.manifest import load_decoder_manifest, save_manifest

pytestmark = pytest.mark.slow

PRINTABLE = "".join(map(chr, range(33, 127)))
PROMPTS = ["a", "some longer prompt", "two words"]
CASES = [
    case("some prompt", temperature=1.5, lam=0.5, max_new_tokens=70),
    case("é", top_k=5, repetition_penalty=1.2),
    case("caf" + "\u00e9", skip_special_tokens=False),
    case(byte_ids("é")[:1], allowed_token_ids=byte_ids(bytes(range(128, 192))), max_new_tokens=6),
    case(PROMPTS, temperature=[0, 1, 2], max_new_tokens=[3, 20, 9], stop=[[], ["x"], ["12", "1"]]),
    case(PROMPTS, n=2, logit_bias={"5": 3}),
    case("ab", stop=list(PRINTABLE), allowed_token_ids=byte_ids(PRINTABLE), min_new_tokens=4),
    case("x" * 96, max_new_tokens=5),
    case("", max_new_tokens=5),
    case("x" * 97),
]
EVEN = [one for one in CASES if one["prompt"] is not PROMPTS]


def compare(folder: Path, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    answers = by_node(folder, cases, tmp_path)
    with opened(folder) as model:
        assert not differences(model, cases, answers)
        drawn = {len(row["token_ids"]) for answer in answers if isinstance(answer, list) for row in answer}
    assert max(drawn) >= 20


@pytest.mark.parametrize("form", ["concat", "scatter", "grouped", "shared"])
def test_a_cache_of_every_form_gives_pythons_tokens(form: str, tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.random(4), form=form, with_mass=True)
    compare(folder, CASES, tmp_path)


@pytest.mark.parametrize(("form", "columns"), [("scatter", 3), ("grouped", 3), ("concat", 2)])
def test_prompts_are_read_in_the_chunks_that_a_graph_takes(form: str, columns: int, tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.random(5), form=form)
    manifest = load_decoder_manifest(folder)
    save_manifest(folder, replace(manifest, decoder=replace(manifest.decoder, most_columns=columns)))
    compare(folder, CASES, tmp_path)


@pytest.mark.parametrize("form", ["scatter", "concat"])
def test_without_padding_a_batch_of_several_lengths_is_refused_as_in_python(form: str, tmp_path: Path) -> None:
    folder = export(
        tmp_path / "out", Toy.random(6), form=form, padding=False, buffer_step=8 if form == "scatter" else 0
    )
    compare(folder, [*EVEN, case(["ab", "cd"], temperature=3), case(PROMPTS)], tmp_path)


def test_a_rule_that_the_graph_lacks_is_refused_as_in_python(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.random(7))
    manifest = load_decoder_manifest(folder)
    save_manifest(folder, replace(manifest, sampler=replace(manifest.sampler, rules=("top_w", "top_k"))))
    compare(folder, [case("ab", top_k=5, max_new_tokens=20), case("ab", top_p=0.9), case("ab", rule="none")], tmp_path)
