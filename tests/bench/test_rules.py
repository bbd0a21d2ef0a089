"""`topw bench rules`: all rules draw equally many tokens, take turns in every round, and are compared by round."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from tests.support.toy_model import CONTEXT, Toy, byte_ids, export
from topw_deploy.cli.bench import bench_rules as command
from topw_deploy.cli.main import topw
from topw_deploy.errors import BenchmarkError, ManifestError, ParameterError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.rule_settings import read_rules, read_temperatures
from topw_lab.bench.measurement import MachineInfo
from topw_lab.bench.rules import run as run_module
from topw_lab.bench.rules.picture import draw_rules
from topw_lab.bench.rules.report import ModelReport, RulesReport, RuleTimes
from topw_lab.bench.rules.request import DEFAULT_RULES, RulesRequest, choose, prompt_ids
from topw_lab.bench.rules.run import run
from topw_lab.bench.rules.worker import start

PROMPT = [5, 9, 40, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("rules") / "out", Toy.random(3))


@pytest.fixture
def asked(folder: Path) -> RulesRequest:
    rules = read_rules("top_k=3,top_w")
    return RulesRequest(
        folders=(folder,), rules=rules, temperatures=(0.5, 2.0), samplers=("graph",), prompt_tokens=4, new_tokens=5,
        rounds=2,
    )  # fmt: skip


# The request


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": read_rules("top_w")}, "rules is top_w, but must have top_w once, and at least one other"),
        ({"rules": read_rules("top_k=3,p_less")}, "rules is top_k 3, p_less, but must have top_w once"),
        ({"rules": read_rules("top_w,top_w:lam=1")}, "rules is top_w, top_w lam=1, but must have top_w once"),
        ({"rules": read_rules("top_k=3,top_w") * 2}, "each once"),
        ({"temperatures": ()}, "temperatures is empty, but must have at least one value"),
        ({"temperatures": (1.0, -1.0)}, "temperature is -1.0, but must be a finite number >= 0"),
        ({"temperatures": (1e300,)}, "in float32 too"),
        ({"folders": ()}, "folders is empty"),
        ({"new_tokens": 1}, "new_tokens is 1, but must be an integer >= 2"),
        ({"rounds": 0}, "rounds is 0"),
        ({"prompt": "text"}, "prompt and prompt_tokens are both given"),
        ({"threads": (0,)}, r"threads are \[0\]"),
        ({"new_tokens": CONTEXT}, rf"4 \+ {CONTEXT} tokens are {CONTEXT + 4}, but the context has {CONTEXT}"),
        ({"prompt_tokens": None, "prompt": "text", "new_tokens": CONTEXT}, "lower prompt or new_tokens"),
        ({"samplers": ("numpy",)}, "'numpy' is not a side of this benchmark; choose from native, graph"),
    ],
)
def test_a_request_out_of_range_is_refused(asked: RulesRequest, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        run(replace(asked, **changes))


def test_a_prompt_is_a_text_or_random_tokens_of_a_seed(asked: RulesRequest, folder: Path) -> None:
    assert prompt_ids(replace(asked, prompt_tokens=None, prompt="hello"), folder) == byte_ids("hello")
    random = prompt_ids(asked, folder)
    assert len(random) == 4
    assert random == prompt_ids(asked, folder) != prompt_ids(replace(asked, seed=1), folder)


def test_a_folder_that_is_no_export_is_refused_before_anything_is_timed(asked: RulesRequest, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="topw_manifest"):
        run(replace(asked, folders=(*asked.folders, tmp_path)))


def test_without_the_native_library_only_the_function_runs(
    asked: RulesRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPW_NATIVE", "0")
    present, absent = choose(replace(asked, samplers=()))
    assert [side.name for side in present] == ["graph"]
    assert [side.name for side in absent] == ["native"]
    with pytest.raises(BenchmarkError, match="native was requested, but is not here"):
        choose(replace(asked, samplers=("native",)))


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
    stopping = export(
        tmp_path / "out", Toy.script(byte_ids("abcdef"), 4), generation_config={"stop_strings": ["c"]}
    )  # fmt: skip
    settings = {"folder": str(stopping), "sampler": "graph", "threads": 1, "prompt": PROMPT, "new_tokens": 6}
    with pytest.raises(BenchmarkError, match=r"ended after 3 of 6 tokens \(stop\); remove the stopping parameters"):
        start(settings)["run"](parameters={"rule": "top_w", "temperature": 1.0}, seed=0)


# The run


class Recorder:
    """Takes the place of WorkerProcess, and records the calls."""

    asked: ClassVar[list[tuple[str, float, int]]] = []

    def __init__(self, name: str, file: str, settings: dict[str, Any], *, threads: int) -> None:
        assert settings["threads"] == threads

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, do: str, parameters: dict[str, Any], seed: int) -> dict[str, float]:
        self.asked.append((parameters["rule"], parameters["temperature"], seed))
        return {"seconds": float(len(self.asked)), "certified": 1.0, "kept": 2.0}


def test_every_round_visits_every_rule_and_temperature_with_the_same_random_numbers(
    asked: RulesRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "WorkerProcess", Recorder)
    monkeypatch.setattr(Recorder, "asked", [])
    report = run(replace(asked, rules=read_rules("top_k=3,p_less,top_w"), rounds=7, seed=20, threads=(1, 2)))
    orders = []
    for start_of in range(0, len(Recorder.asked), 6):
        places = Recorder.asked[start_of : start_of + 6]
        number = start_of // 6 % 8  # a warm-up and 7 rounds for each thread count
        assert {(rule, t) for rule, t, _ in places} == {(r, t) for r in ("top_k", "p_less", "top_w") for t in (0.5, 2)}
        assert {seed for *_, seed in places} == {20 + number}
        orders.append(tuple(place[:2] for place in places))
    assert len(orders) == 16
    assert len(set(orders)) > 2
    assert [model.threads for model in report.models] == [1, 2]
    for model in report.models:
        assert [(cell.temperature, cell.rule, len(cell.runs)) for cell in model.cells] == [
            (t, rule, 7) for t in (0.5, 2.0) for rule in ("top_k 3", "p_less", "top_w")
        ]
    warm_up = {float(place + 1) for place in range(6)}
    assert not warm_up & {second for cell in report.models[0].cells for second in cell.seconds}


@pytest.mark.slow
def test_the_command_writes_table_json_and_picture(folder: Path, tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    options = (
        "--rules",
        "top_k=3,min_p=0.1,top_w",
        "--temperatures",
        "0.5,2",
        "--max-new-tokens",
        "4",
        "--rounds",
        "2",
    )
    done = CliRunner().invoke(
        topw, ["bench", "rules", str(folder), *options, "--prompt", "ab", "--samplers", "graph", "--quiet", *files]
    )
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


def test_the_command_has_the_defaults_of_the_request() -> None:
    defaults = {option.name: option.default for option in command.params}
    assert defaults["rules"] == DEFAULT_RULES
    fields = RulesRequest.__dataclass_fields__
    assert tuple(read_temperatures(str(defaults["temperatures"]))) == fields["temperatures"].default
    assert (defaults["new_tokens"], defaults["rounds"]) == (fields["new_tokens"].default, fields["rounds"].default)


# The report


def model_report(times: dict[tuple[str, float], list[float]], certified: float = 1.0) -> ModelReport:
    cells = [
        RuleTimes(rule, temperature, [{"seconds": one, "certified": certified, "kept": 4.0} for one in found])
        for (rule, temperature), found in times.items()
    ]
    return ModelReport(Path("out"), "native", 1, 4, "top_w", cells)


@pytest.fixture
def two() -> ModelReport:
    """Two temperatures and three rounds; the second round is slow for all."""
    return model_report(
        {
            ("top_k=3", 1.0): [0.010, 0.020, 0.010],
            ("p_less", 1.0): [0.030, 0.060, 0.030],
            ("top_w", 1.0): [0.022, 0.042, 0.022],
            ("top_k=3", 2.0): [0.010, 0.020, 0.010],
            ("p_less", 2.0): [0.010, 0.020, 0.010],
            ("top_w", 2.0): [0.012, 0.024, 0.012],
        },
        0.75,
    )


def test_the_overhead_is_that_of_the_median_to_the_mean_of_the_other_medians(two: ModelReport) -> None:
    assert two.overhead(1.0).value == pytest.approx(0.1)  # 22 to (10 + 30) / 2
    assert two.overhead(2.0).value == pytest.approx(0.2)  # 12 to 10
    assert two.overhead().value == pytest.approx(17 / 15 - 1)  # (22 + 12) / 2 to (20 + 10) / 2
    assert two.overhead(1.0).rounds == pytest.approx([0.1, 0.05, 0.1])
    assert two.overhead(2.0).rounds == pytest.approx([0.2] * 3)
    assert two.overhead().rounds == pytest.approx([17 / 15 - 1, 33 / 30 - 1, 17 / 15 - 1])


def test_the_interval_resamples_whole_rounds(two: ModelReport) -> None:
    # In 7 of 27 drawings the slow round is the median, of all rules at once: 42 to (20 + 60) / 2.
    assert two.overhead(1.0).interval == pytest.approx((0.05, 0.1))
    assert two.overhead(2.0).interval == pytest.approx((0.2, 0.2))


def test_the_fastest_rule_is_never_top_w(two: ModelReport) -> None:
    assert two.fastest_rule == "top_k=3"
    assert two.overhead(to_fastest=True).value == pytest.approx(0.7)  # 17 to 10


def report_of(asked: RulesRequest, machine: MachineInfo, *models: ModelReport) -> RulesReport:
    absent = [("native", "not here: not built")]
    return RulesReport(request=replace(asked, temperatures=(1.0, 2.0)), machine=machine, models=models, absent=absent)


def test_the_table_has_times_certified_shares_and_overheads(
    asked: RulesRequest, any_machine: MachineInfo, two: ModelReport
) -> None:
    text = report_of(asked, any_machine, two).text()
    assert "| top_k=3 | 10.000 (10.000-15.000), 75% |" in text
    assert "+10.0 % (+5.0 to +10.0)" in text
    assert "+13.3 % (+10.0 to +13.3)" in text
    assert "top_k=3 |" in text.splitlines()[-3]
    assert text.endswith("Left out: native - not here: not built")


def test_the_json_has_every_round(asked: RulesRequest, any_machine: MachineInfo, two: ModelReport) -> None:
    document = json.loads(json.dumps(report_of(asked, any_machine, two).as_dict()))
    (model,) = document["models"]
    assert model["cells"][1]["seconds"] == [0.030, 0.060, 0.030]
    assert model["cells"][1]["certified_share"] == 0.75
    assert model["overhead"]["1"]["rounds"] == pytest.approx([0.1, 0.05, 0.1])
    assert model["overhead_to_fastest"]["rule"] == "top_k=3"


# The picture


def height(path: Path) -> int:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int(struct.unpack(">II", data[16:24])[1])


@pytest.mark.slow
def test_the_picture_has_a_row_of_panels_per_model_with_every_difference(
    asked: RulesRequest, any_machine: MachineInfo, two: ModelReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    draw_rules(tmp_path / "one.png", report_of(asked, any_machine, two))
    (first, texts, marks), (second, *_) = seen
    assert (first, second) == ("T = 1", "T = 2")
    assert texts == ["22.00 ms  +10.0 %", "30.00 ms  +50.0 %", "10.00 ms  -50.0 %"]  # upwards
    assert marks == pytest.approx([10, 50, -50])
    assert titles == [
        "out, native, 1 thread: Top-W takes 13.3 % more than the mean of the other rules, 70.0 % more than top_k=3"
    ]
    draw_rules(tmp_path / "two.png", report_of(asked, any_machine, two, two))
    assert height(tmp_path / "one.png") < height(tmp_path / "two.png") < 4000
