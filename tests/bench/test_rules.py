"""`topw bench rules`: all rules draw equally many tokens, take turns in every round, and are compared by round."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import Result
from PIL import Image

from tests.support.toy_model import CONTEXT, Toy, byte_ids, export
from topw_deploy.cli.bench import bench_rules as command
from topw_deploy.errors import BenchmarkError, ManifestError, ParameterError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.rule_settings import read_rules
from topw_lab.bench import rules as rules_module
from topw_lab.bench.rules import DEFAULT_RULES, DEFAULT_TEMPERATURES, ModelTimes, RulesRequest, draw, run, start

PROMPT = [5, 9, 40, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("rules") / "out", Toy.random(3))


@pytest.fixture
def asked(folder: Path) -> RulesRequest:
    return RulesRequest(
        folders=(folder,), rules=read_rules("top_k=3,top_w"), temperatures=(0.5, 2.0), samplers=("graph",),
        prompt_tokens=4, new_tokens=5, rounds=2,
    )  # fmt: skip


# The request


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": read_rules("top_w")}, "rules is top_w, but must have top_w once, and at least one other"),
        ({"rules": read_rules("top_k=3,p_less")}, "rules is top_k 3, p_less, but must have top_w once"),
        ({"rules": read_rules("top_w,top_w:lam=1")}, "rules is top_w, top_w lam=1, but must have top_w once"),
        ({"new_tokens": CONTEXT}, rf"4 \+ {CONTEXT} tokens are {CONTEXT + 4}, but the context has {CONTEXT}"),
        ({"prompt_tokens": None, "prompt": "text", "new_tokens": CONTEXT}, "lower prompt or new_tokens"),
        ({"samplers": ("numpy",)}, "'numpy' is not a side of this benchmark; choose from native, graph"),
    ],
)
def test_a_request_out_of_range_is_refused(asked: RulesRequest, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        run(replace(asked, **changes))


def test_a_folder_that_is_no_export_is_refused_before_anything_is_timed(asked: RulesRequest, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="topw_manifest"):
        run(replace(asked, folders=(*asked.folders, tmp_path)))


def test_without_the_native_library_the_native_sampler_is_an_error(
    asked: RulesRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPW_NATIVE", "0")
    with pytest.raises(BenchmarkError, match="native was requested, but is not here"):
        run(replace(asked, samplers=("native",)))


# The worker


@pytest.mark.parametrize("text", ["top_k=3", "top_w"])
def test_a_generation_has_all_of_its_tokens_under_its_rule(folder: Path, text: str) -> None:
    settings = {"folder": str(folder), "sampler": "graph", "threads": 1, "prompt": PROMPT, "new_tokens": 6}
    (rule,) = read_rules(text)
    parameters = {**rule.parameters, "temperature": 2.0}
    found = start(settings)["run"](parameters=parameters, seed=3)
    model = TopWModel.from_pretrained(folder, provider="cpu", sampler="graph")
    result = model.generate(PROMPT, max_new_tokens=6, seed=3, ignore_eos=True, **parameters)
    assert len(result.token_ids) == 6
    assert found["kept"] == sum(result.kept) / 6
    assert found["certified"] == result.certified_share
    assert found["seconds"] > 0
    if text == "top_k=3":
        assert found["kept"] == 3


def test_a_generation_that_ends_early_is_an_error(tmp_path: Path) -> None:
    script = Toy.script(byte_ids("abcdef"), 4)
    stopping = export(tmp_path / "out", script, generation_config={"stop_strings": ["c"]})
    settings = {"folder": str(stopping), "sampler": "graph", "threads": 1, "prompt": PROMPT, "new_tokens": 6}
    with pytest.raises(BenchmarkError, match=r"ended after 3 of 6 tokens \(stop\); remove the stopping parameters"):
        start(settings)["run"](parameters={"rule": "top_w", "temperature": 1.0}, seed=0)


# The run


class Recorder:
    """Takes the place of Worker, and records the calls."""

    asked: ClassVar[list[tuple[str, float, int]]] = []
    prompts: ClassVar[list[list[int]]] = []

    def __init__(self, name: str, file: str, settings: dict[str, Any], *, threads: int) -> None:
        assert settings["threads"] == threads
        self.prompts.append(settings["prompt"])

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, do: str, parameters: dict[str, Any], seed: int) -> dict[str, float]:
        self.asked.append((parameters["rule"], parameters["temperature"], seed))
        return {"seconds": float(len(self.asked)), "certified": 1.0, "kept": 2.0}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr(rules_module, "Worker", Recorder)
    monkeypatch.setattr(Recorder, "asked", [])
    monkeypatch.setattr(Recorder, "prompts", [])
    return Recorder


def test_every_round_visits_every_rule_and_temperature_with_the_same_random_numbers(
    asked: RulesRequest, recorder: type[Recorder]
) -> None:
    report = run(replace(asked, rules=read_rules("top_k=3,p_less,top_w"), rounds=7, seed=20, threads=(1, 2)))
    orders = []
    for start_of in range(0, len(recorder.asked), 6):
        places = recorder.asked[start_of : start_of + 6]
        number = start_of // 6 % 8  # a warm-up and 7 rounds for each thread count
        assert {(rule, t) for rule, t, _ in places} == {(r, t) for r in ("top_k", "p_less", "top_w") for t in (0.5, 2)}
        assert {seed for *_, seed in places} == {20 + number}
        orders.append(tuple(place[:2] for place in places))
    assert len(orders) == 16
    assert len(set(orders)) > 2
    models = report.results["models"]
    assert [model["threads"] for model in models] == [1, 2]
    for model in models:
        assert [(cell["temperature"], cell["rule"], len(cell["seconds"])) for cell in model["cells"]] == [
            (t, rule, 7) for t in (0.5, 2.0) for rule in ("top_k 3", "p_less", "top_w")
        ]
    warm_up = {float(place + 1) for place in range(6)}
    assert not warm_up & {second for cell in models[0]["cells"] for second in cell["seconds"]}


def test_a_prompt_is_a_text_or_random_tokens_of_a_seed(asked: RulesRequest, recorder: type[Recorder]) -> None:
    for request in (replace(asked, prompt_tokens=None, prompt="hello"), asked, asked, replace(asked, seed=1)):
        run(request)
    text, first, again, other = recorder.prompts
    assert text == byte_ids("hello")
    assert len(first) == 4
    assert first == again != other


@pytest.mark.slow
def test_the_command_writes_table_json_and_picture(bench: Callable[..., Result], folder: Path, tmp_path: Path) -> None:
    done = bench("rules", folder, "--rules", "top_k=3,min_p=0.1,top_w", "--temperatures", "0.5,2", "--max-new-tokens",
                 "4", "--rounds", 2, "--prompt", "ab", "--samplers", "graph", "--quiet", "--json",
                 tmp_path / "out.json", "--plot", tmp_path / "out.png")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert "2 + 4 tokens, 2 rounds" in done.stdout
    assert f"{folder}, graph, 1 thread: ms/token" in done.stdout
    assert "| model" in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    (model,) = document["models"]
    assert [cell["rule"] for cell in model["cells"]] == ["top_k 3", "min_p 0.1", "top_w"] * 2
    assert all(min(cell["seconds"]) > 0 and len(cell["seconds"]) == 2 for cell in model["cells"])
    assert list(model["overhead"]) == ["0.5", "2", "all"]
    assert [rule["label"] for rule in document["settings"]["rules"]] == ["top_k 3", "min_p 0.1", "top_w"]
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_has_the_usual_values_of_the_rules() -> None:
    defaults = {option.name: option.default for option in command.params}
    assert (defaults["rules"], defaults["temperatures"]) == (DEFAULT_RULES, DEFAULT_TEMPERATURES)


# The report


@pytest.fixture
def two() -> ModelTimes:
    """Two temperatures and three rounds; the second round is slow for all."""
    seconds = {
        ("top_k=3", 1.0): [0.010, 0.020, 0.010],
        ("p_less", 1.0): [0.030, 0.060, 0.030],
        ("top_w", 1.0): [0.022, 0.042, 0.022],
        ("top_k=3", 2.0): [0.010, 0.020, 0.010],
        ("p_less", 2.0): [0.010, 0.020, 0.010],
        ("top_w", 2.0): [0.012, 0.024, 0.012],
    }
    cells = {key: [{"seconds": one, "certified": 0.75, "kept": 4.0} for one in each] for key, each in seconds.items()}
    return ModelTimes("out, native, 1 thread", "top_w", cells)


def test_the_overhead_is_that_of_the_median_to_the_mean_of_the_other_medians(two: ModelTimes) -> None:
    assert two.overhead(1.0).value == pytest.approx(0.1)  # 22 to (10 + 30) / 2
    assert two.overhead(2.0).value == pytest.approx(0.2)  # 12 to 10
    assert two.overhead().value == pytest.approx(17 / 15 - 1)  # (22 + 12) / 2 to (20 + 10) / 2
    assert two.overhead(1.0).rounds == pytest.approx([0.1, 0.05, 0.1])
    assert two.overhead(2.0).rounds == pytest.approx([0.2] * 3)
    assert two.overhead().rounds == pytest.approx([17 / 15 - 1, 33 / 30 - 1, 17 / 15 - 1])


def test_the_interval_resamples_whole_rounds(two: ModelTimes) -> None:
    # In 7 of 27 drawings the slow round is the median, of all rules at once: 42 to (20 + 60) / 2.
    assert two.overhead(1.0).interval == pytest.approx((0.05, 0.1))
    assert two.overhead(2.0).interval == pytest.approx((0.2, 0.2))


def test_the_fastest_rule_is_never_top_w(two: ModelTimes) -> None:
    assert two.fastest_rule == "top_k=3"
    assert two.overhead(to_fastest=True).value == pytest.approx(0.7)  # 17 to 10


def test_table_and_json_have_times_certified_shares_and_overheads(two: ModelTimes) -> None:
    assert two.cell_text("top_k=3", 1.0) == "10.000 (10.000-15.000), 75%"
    _, first, _, every, fastest = two.overhead_row()
    assert (first, every) == ("+10.0 % (+5.0 to +10.0)", "+13.3 % (+10.0 to +13.3)")
    assert fastest.endswith("top_k=3")
    model = json.loads(json.dumps(two.as_dict()))
    assert model["cells"][1]["seconds"] == [0.030, 0.060, 0.030]
    assert model["cells"][1]["certified_share"] == 0.75
    assert model["overhead"]["1"]["rounds"] == pytest.approx([0.1, 0.05, 0.1])
    assert model["overhead_to_fastest"]["rule"] == "top_k=3"


# The picture


@pytest.mark.slow
def test_the_picture_has_a_row_of_panels_per_model_with_every_difference(
    two: ModelTimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    seen: list[tuple[str, list[str], list[float]]] = []
    titles: list[str] = []
    save = Figure.savefig

    def kept(figure: Any, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        titles.extend(part.get_suptitle().replace("\n", " ") for part in figure.subfigs)
        for ax in figure.axes:
            marks = [float(line.get_xdata()[0]) for line in ax.lines if line.get_marker() == "o"]
            seen.append((ax.get_title(loc="left"), [text.get_text() for text in ax.texts], marks))

    monkeypatch.setattr(Figure, "savefig", kept)
    draw(tmp_path / "one.png", [two], "a note")
    (first, texts, marks), (second, *_) = seen
    assert (first, second) == ("T = 1", "T = 2")
    assert texts == ["22.00 ms  +10.0 %", "30.00 ms  +50.0 %", "10.00 ms  -50.0 %"]  # upwards
    assert marks == pytest.approx([10, 50, -50])
    assert titles == [
        "out, native, 1 thread: Top-W takes 13.3 % more than the mean of the other rules, 70.0 % more than top_k=3"
    ]
    draw(tmp_path / "two.png", [two, two], "a note")
    heights = [Image.open(tmp_path / name).height for name in ("one.png", "two.png")]
    assert heights[0] < heights[1] < 4000
