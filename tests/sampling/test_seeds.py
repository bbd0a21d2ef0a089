from __future__ import annotations

from pathlib import Path

from topw_deploy.sampling.seeds import fresh_seed, prompt_seed


def test_fresh_seeds_differ_and_survive_json_readers_with_doubles() -> None:
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(int(float(seed)) == seed for seed in seeds)


def test_the_seeds_of_a_files_prompts_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "contract" / "random.md").read_text(encoding="utf-8")
    section = page.split("## Many prompts")[1].split("## ")[0]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 4
    for seed, index, expected in rows:
        assert prompt_seed(int(seed), int(index)) == int(expected)
