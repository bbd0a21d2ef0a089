"""Resuming or removing a killed export."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support import traces
from tests.support.tiny_models import write_checkpoint, write_decoder
from tests.support.warm_process import fork
from topw_deploy.errors import ExportError
from topw_deploy.export import export_model
from topw_deploy.export.request import export_request
from topw_deploy.export.resume.finished_stages import stamp_of_files
from topw_deploy.export.resume.journal import DataLog, Journal
from topw_deploy.export.write import data_files, weights
from topw_deploy.export.write.staging import StagedFolder
from topw_deploy.manifest import load_manifest
from topw_deploy.progress import Progress
from topw_deploy.sampling.parameters import TopWParameters

from .killed import export_and_die

STOPS = ("Lowered", "Writing", "9", "Verifying", "Moving")


def killed_export(model: Path, out: Path, stop: str) -> list[str]:
    process = fork(export_and_die, str(model), str(out), stop, traces.folder)
    lines = process.stdout.read().splitlines()
    assert process.wait() == -signal.SIGKILL
    return lines


def export(model: Path, out: Path, **settings: object) -> list[str]:
    lines: list[str] = []
    settings = {"neighbour_bound": True, "verify": False, **settings}
    export_model(export_request(model=str(model), output=out, **settings), Progress(lines.append))  # type: ignore[arg-type]
    return lines


def kept_stages(lines: list[str]) -> list[str]:
    start = "Kept from the interrupted export: "
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def read_contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def external_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "EXTERNAL_ABOVE", 10_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama_tied")


@pytest.fixture(scope="module")
def history(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """An export killed at every stage and then finished, with each attempt's lines."""
    out = tmp_path_factory.mktemp("killed") / "out"
    lines = {stop: killed_export(model, out, stop) for stop in STOPS}
    assert not out.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "EXTERNAL_ABOVE", 10_000)
        lines["never"] = export(model, out, resume=True, verify=True)
    return out, lines


@pytest.mark.long
def test_each_attempt_continues_where_the_previous_one_was_killed(history: tuple[Path, dict[str, list[str]]]) -> None:
    lines = history[1]
    assert [kept_stages(lines[stop]) for stop in (*STOPS[:3], "Verifying")] == [
        [],
        ["traced graph"],
        ["traced graph", "neighbour bound"],
        ["traced graph", "neighbour bound", "9 weights of model.onnx_data"],
    ]
    assert [name.split(" ", 1)[-1] for name in kept_stages(lines["Moving"])[2:]] == [
        "weights of model.onnx_data",
        "files",
    ]
    assert kept_stages(lines["never"])[-1] == "verification"
    assert not any("Tracing" in line or "Starting over" in line for stop in STOPS[1:] for line in lines[stop])


@pytest.mark.long
@pytest.mark.slow
def test_a_resumed_export_equals_an_uninterrupted_one(
    history: tuple[Path, dict[str, list[str]]], model: Path, tmp_path: Path
) -> None:
    export(model, tmp_path / "out", verify=True)
    assert read_contents(history[0]) == read_contents(tmp_path / "out")
    assert load_manifest(history[0]).verification.status == "passed"
    assert [path.name for path in history[0].parent.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_killed_export_is_removed_by_the_next_one_that_does_not_resume(foreign_decoder: Path, tmp_path: Path) -> None:
    killed_export(foreign_decoder, tmp_path / "out", "Writing")
    assert len(list(tmp_path.iterdir())) == 1
    assert kept_stages(export(foreign_decoder, tmp_path / "out")) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_changed_source_starts_over_with_a_message(tmp_path: Path, foreign_decoder: Path) -> None:
    """The modification time stays."""
    data = (foreign_decoder / "model.onnx.data").read_bytes()
    source = tmp_path / "in"
    source.mkdir()
    for name, content in read_contents(foreign_decoder).items():
        (source / name).write_bytes(content)
    killed_export(source, tmp_path / "out", "Verifying")
    before = (source / "model.onnx.data").stat()
    (source / "model.onnx.data").write_bytes(data[:-4] + bytes(4))
    os.utime(source / "model.onnx.data", ns=(before.st_atime_ns, before.st_mtime_ns))
    lines = export(source, tmp_path / "out", resume=True)
    assert [line for line in lines if line.startswith("Starting over: copy of model.onnx.data")]
    assert [line for line in lines if line.startswith("Starting over: neighbour bound")]
    assert kept_stages(lines) == ["tokenizer files"]
    assert (tmp_path / "out" / "model.onnx.data").read_bytes() == data[:-4] + bytes(4)


@pytest.mark.slow
def test_other_options_keep_only_independent_stages(tmp_path: Path, foreign_decoder: Path) -> None:
    killed_export(foreign_decoder, tmp_path / "out", "Verifying")
    lines = export(foreign_decoder, tmp_path / "out", resume=True, with_mass=True, neighbour_bound=False)
    assert kept_stages(lines) == ["copy of model.onnx.data", "tokenizer files"]


def test_a_write_to_a_large_file_changes_its_stamp(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(17 << 20))
    about, before = path.stat(), stamp_of_files([path])
    assert stamp_of_files([path]) == before
    with path.open("r+b") as stream:
        stream.seek(16 << 20)
        stream.write(b"1")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert path.stat().st_size == about.st_size
    assert path.stat().st_mtime_ns == about.st_mtime_ns
    assert stamp_of_files([path]) != before


@pytest.mark.slow
def test_the_folder_of_a_running_export_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom topw_deploy.export.write.staging import StagedFolder\n"
        f"with StagedFolder(Path({str(tmp_path / 'out')!r})) as staged:\n    print(staged.workspace, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    living = Path(process.stdout.readline().strip())
    for resume in (False, True):
        with StagedFolder(tmp_path / "out", resume=resume) as staged:
            assert staged.workspace != living
    assert living.is_dir()
    process.communicate("")
    assert not living.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), OSError(28, "No space left on device")])
def test_an_interruption_keeps_the_files_only_with_resume(tmp_path: Path, error: BaseException) -> None:
    for resume, left in ((False, 0), (True, 1)):
        with pytest.raises((type(error), ExportError)) as caught, StagedFolder(tmp_path / "out", resume=resume):
            raise error
        assert len(list(tmp_path.iterdir())) == left
    if isinstance(error, OSError):
        assert "disk is full" in str(caught.value)
        assert "--resume" in str(caught.value)
    with StagedFolder(tmp_path / "out", resume=True) as staged:
        assert [path.name for path in tmp_path.iterdir()] == [staged.workspace.name]


@pytest.mark.long
def test_an_export_resumes_after_a_full_disk(
    tmp_path: Path, model: Path, history: tuple[Path, dict[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(data_files, "byte_blocks", fill_disk_after(5))
        with pytest.raises(ExportError, match=r"disk is full.*--resume"):
            export(model, tmp_path / "out", resume=True)
    assert kept_stages(export(model, tmp_path / "out", resume=True)) == [
        "traced graph",
        "neighbour bound",
        "5 weights of model.onnx_data",
    ]
    data = "model.onnx_data"
    assert (tmp_path / "out" / data).read_bytes() == (history[0] / data).read_bytes()


def fill_disk_after(count: int) -> Callable[..., object]:
    """Return a `byte_blocks` for `count` weights, after which the disk is full."""
    real, calls = data_files.byte_blocks, [0]

    def byte_blocks(tensor: object) -> object:
        calls[0] += 1
        if calls[0] > count:
            raise OSError(28, "No space left on device")
        return real(tensor)  # type: ignore[arg-type]

    return byte_blocks


def test_damaged_weights_are_written_again(tmp_path: Path) -> None:
    import onnx_ir as ir

    values = [
        ir.Value(name=name, const_value=ir.tensor(np.full(600, number, np.float32), name=name))
        for number, name in enumerate("abc")
    ]
    slots = data_files.lay_out(values)
    data_files.write_data(slots, tmp_path, DataLog(Journal(tmp_path), "s"), lambda _part: None)
    path = tmp_path / data_files.DATA_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:3000] + b"x" + whole[3001:-1])
    lines: list[str] = []
    log = DataLog(Journal(tmp_path, lines.append), "s")
    done: list[int] = []
    data_files.write_data(slots, tmp_path, log, done.append)
    assert path.read_bytes() == whole
    assert sum(done) == len(whole)
    assert lines == ["Kept from the interrupted export: 1 weights of model.onnx_data"]
    assert len(Journal(tmp_path).data_file(data_files.DATA_FILE)["weights"]) == 3


def test_a_journal_ends_at_an_incomplete_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.record("a", "1", n=5)
    journal.record("b", "1")
    path = tmp_path / "journal.jsonl"
    path.write_text(path.read_text()[:-4])
    assert Journal(tmp_path).find("a", "1") == {"n": 5}
    assert Journal(tmp_path).find("b", "1") is None


def export_anew(model: Path, out: Path) -> Path:
    export(model, out)
    return out


def interrupt_export(model: Path, out: Path, stop: str, **settings: object) -> None:
    """A resumable export interrupted at the line starting with `stop`."""

    def say(line: str) -> None:
        if line.startswith(stop):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(
            export_request(model=str(model), output=out, verify=False, resume=True, **settings),
            Progress(say),
        )  # type: ignore[arg-type]


@pytest.mark.slow
def test_resuming_with_another_model_never_writes_into_a_hard_linked_file(model: Path, tmp_path: Path) -> None:
    """ONNX and traced models can share a data file name."""
    source = write_decoder(tmp_path / "onnx", "llama_untied")
    decoder = onnx.load(source / "model.onnx")
    onnx.save(decoder, source / "model.onnx", save_as_external_data=True, location=data_files.DATA_FILE)
    before = read_contents(source)
    interrupt_export(source, tmp_path / "out", "Copying tokenizer", hard_link=True)
    assert (source / data_files.DATA_FILE).stat().st_nlink == 2
    interrupt_export(model, tmp_path / "out", "Copying tokenizer")
    assert (source / data_files.DATA_FILE).stat().st_nlink == 1
    assert read_contents(source) == before


@pytest.mark.slow
def test_a_changed_table_in_a_subfolder_is_measured_again(tmp_path: Path) -> None:
    source = write_decoder(tmp_path / "onnx", "llama_untied")
    decoder = onnx.load(source / "model.onnx")
    (source / "data").mkdir()
    onnx.save(decoder, source / "model.onnx", save_as_external_data=True, location="data/weights.bin")
    interrupt_export(source, tmp_path / "out", "Moving", neighbour_bound=True)
    data = source / "data" / "weights.bin"
    data.write_bytes(np.abs(np.frombuffer(data.read_bytes(), np.float32)).tobytes())
    lines = export(source, tmp_path / "out", resume=True)
    assert kept_stages(lines) == ["tokenizer files"]
    assert read_contents(tmp_path / "out") == read_contents(export_anew(source, tmp_path / "fresh"))


@pytest.mark.slow
def test_a_hard_link_is_not_kept_as_a_copy(foreign_decoder: Path, tmp_path: Path) -> None:
    interrupt_export(foreign_decoder, tmp_path / "out", "Copying tokenizer", hard_link=True)
    export(foreign_decoder, tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "model.onnx.data").stat().st_nlink == 1


@pytest.mark.slow
def test_files_that_only_an_earlier_attempt_wrote_are_removed(model: Path, tmp_path: Path) -> None:
    """Shards of another size; a removed chat template."""
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    interrupt_export(source, tmp_path / "out", "Moving", max_shard_size=10_000)
    (source / "chat_template.jinja").unlink()
    export(source, tmp_path / "out", resume=True, neighbour_bound=False)
    export(source, tmp_path / "fresh", neighbour_bound=False)
    assert read_contents(tmp_path / "out") == read_contents(tmp_path / "fresh")


@pytest.mark.long
def test_other_defaults_are_verified_again(model: Path, tmp_path: Path) -> None:
    killed_export(model, tmp_path / "out", "Moving")
    settings = {"resume": True, "neighbour_bound": True, "verify": True}
    assert "verification" not in kept_stages(
        export(model, tmp_path / "out", defaults=TopWParameters(lam=0.5), **settings)
    )
