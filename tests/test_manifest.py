"""Manifests round-trip, and every invalid folder is refused with its reason."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from topw_deploy import manifest as m
from topw_deploy.errors import ManifestError
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters


def a_manifest(**changes: object) -> m.DecoderManifest:
    base = m.DecoderManifest(
        source={"id": "demo", "revision": "", "route": "trace"},
        libraries={"topw_deploy": "0.1.0"},
        opset={"": 23, "topw": 1},
        inputs=(m.TensorSpec("input_ids", "int64", ("batch", "sequence")),),
        outputs=(m.TensorSpec("next_token", "int64", ("batch",)),),
        sampler=m.SamplerInfo(
            branches=True,
            vocab_size=4096,
            hidden_size=256,
            table_form="Gather(axis=0)",
            options=TopWOptions(metric="cosine", alt_iters=9),
            outputs=("next_token", "logprob", "kept", "certified"),
        ),
        defaults=TopWParameters(geom_scale=0.6),
        decoder=m.DecoderInfo(
            model_type="llama",
            kv_form="concat",
            num_layers=2,
            states=(*m.key_value_states(0, "float", 2, 32, 32), *m.key_value_states(1, "float", 2, 32, 32)),
            kv_dtype="float",
            context_length=512,
            left_padding=True,
        ),
        verification=m.Verification(
            status="partial",
            checks=(m.Check("prefill", True, 1e-6, 1e-4),),
            not_compared=(m.NotCompared("generation", "the source is not available"),),
            notes=(m.Note("kept sets", "24 of 32 equal"),),
        ),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "model.onnx_data").write_bytes(b"weights")
    files = m.describe_files(tmp_path, ["model.onnx", "model.onnx_data"])
    m.save_manifest(tmp_path, a_manifest(files=files))
    return tmp_path


def edit_manifest(folder: Path, **changes: object) -> None:
    """Change fields of the manifest; dotted names are nested."""
    path = folder / m.MANIFEST_NAME
    data = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split("__")
        place = data
        for part in outer:
            place = place[part]
        place[last] = value
    path.write_text(json.dumps(data))


def test_what_is_saved_is_what_is_loaded(folder: Path) -> None:
    loaded = m.load_manifest(folder)
    assert loaded == a_manifest(files=loaded.files)
    assert set(loaded.files) == {"model.onnx", "model.onnx_data"}
    m.check_hashes(folder, loaded)


def test_a_folder_without_a_manifest_is_not_an_export(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="not a finished export"):
        m.load_manifest(tmp_path)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "model.onnx_data").unlink()
    with pytest.raises(ManifestError, match=r"model\.onnx_data is listed .* but missing"):
        m.load_manifest(folder)


def test_a_file_cut_short_is_named_with_both_sizes(folder: Path) -> None:
    (folder / "model.onnx_data").write_bytes(b"weight")
    with pytest.raises(ManifestError, match="has 6 bytes, the manifest says 7"):
        m.load_manifest(folder)


def test_a_file_that_grew_is_named_with_both_sizes(folder: Path) -> None:
    (folder / "model.onnx_data").write_bytes(b"weights and more")
    with pytest.raises(ManifestError, match="has 16 bytes, the manifest says 7"):
        m.load_manifest(folder)


def test_a_changed_file_of_equal_size_passes_loading_but_not_the_hash(folder: Path) -> None:
    (folder / "model.onnx_data").write_bytes(b"WEIGHTS")
    loaded = m.load_manifest(folder)
    with pytest.raises(ManifestError, match=r"model\.onnx_data has SHA-256"):
        m.check_hashes(folder, loaded)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "C:/x", "a\\b", "", "a//b", "./a", "a\0b"])
def test_a_path_that_could_leave_the_folder_is_refused(folder: Path, name: str) -> None:
    data = json.loads((folder / m.MANIFEST_NAME).read_text())
    data["files"][name] = {"sha256": "0" * 64, "size": 0}
    (folder / m.MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(ManifestError, match="not a plain path inside the folder"):
        m.load_manifest(folder)


@pytest.mark.parametrize("linked", ["file", "directory"])
def test_a_symbolic_link_is_refused_even_when_its_target_has_the_right_size(folder: Path, linked: str) -> None:
    outside = folder.parent / f"outside-{linked}"
    outside.mkdir()
    (outside / "weights").write_bytes(b"weights")
    name = "link" if linked == "file" else "sub/weights"
    os.symlink(outside / "weights" if linked == "file" else outside, folder / ("link" if linked == "file" else "sub"))
    data = json.loads((folder / m.MANIFEST_NAME).read_text())
    data["files"][name] = {"sha256": "0" * 64, "size": 7}
    (folder / m.MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(ManifestError, match="symbolic link"):
        m.load_manifest(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"format_version": "1"}, "format version '1'"),
        ({"kind": "sampler"}, "there is a decoder"),
        ({"kind": "both"}, "kind is 'both'"),
        ({"decoder": None}, "decoder is None"),
        ({"sampler__options__metric": "euclid"}, "metric is 'euclid'"),
        ({"sampler__vocab_size": "4096"}, "vocab_size is '4096'"),
        ({"defaults__temperature": -1}, "temperature is -1"),
        ({"defaults__tempratur": 1}, "tempratur"),
        ({"decoder__num_layers": 0}, "num_layers is 0"),
        ({"decoder__states": []}, "states has 0 entries"),
        ({"decoder__states": [{}]}, r"decoder.states\[0\].shape is missing"),
        ({"decoder__most_columns": -1}, "most_columns is -1"),
        ({"decoder__left_padding": "yes"}, "left_padding"),
        ({"decoder__right_padding": 1}, "right_padding"),
        ({"decoder__ragged_chunks": 1}, "ragged_chunks is 1"),
        ({"decoder__attention": None}, "attention is None"),
        ({"decoder__quantisation": "int4"}, "quantisation is 'int4'"),
        ({"decoder__buffer_step": -256}, "buffer_step is -256"),
        ({"decoder__buffer_least": 0.5}, "buffer_least is 0.5"),
        ({"decoder__target": "tpu"}, "target is 'tpu'"),
        ({"decoder__weights": {"float": "many"}}, "weights float is 'many'"),
        ({"files": {}}, "does not list model.onnx"),
        ({"files": []}, "malformed"),
        ({"files__model.onnx": {"sha256": "xyz", "size": 5}}, "not a SHA-256"),
        ({"files__model.onnx": {"sha256": "0" * 64, "size": -5}}, "size of model.onnx is -5"),
        ({"inputs": [{"name": "x"}]}, "missing"),
        ({"verification__status": 5}, "status is 5"),
        ({"verification__checks": [{"name": "x", "passed": True, "difference": "y", "bound": 0}]}, "wrong type"),
        ({"verification__not_compared": None}, "not_compared is None, not a list"),
        (
            {"verification__not_compared": [{"name": "x", "text": "y"}]},
            r"not_compared\[0\] has the unknown field 'text'",
        ),
        ({"verification__notes": [{"name": "x", "text": 5}]}, r"notes\[0\].text is 5"),
        ({"verification__notes": [{"name": "x"}]}, r"verification.notes\[0\].text is missing"),
        ({"verification__note": []}, "verification has the unknown field 'note'"),
    ],
)
def test_a_wrong_field_is_refused_by_name(folder: Path, changes: dict[str, object], reason: str) -> None:
    edit_manifest(folder, **changes)
    with pytest.raises(ManifestError, match=reason):
        m.load_manifest(folder)


def test_a_default_beta_that_depends_on_the_temperature_is_kept_as_text_beside_its_number(folder: Path) -> None:
    defaults = TopWParameters(beta=4.5, temperature=2.0)
    files = m.load_manifest(folder).files
    m.save_manifest(folder, a_manifest(files=files, defaults=defaults, default_beta="1.5+1.5*T"))
    loaded = m.load_manifest(folder)
    assert (loaded.defaults.beta, loaded.default_beta) == (4.5, "1.5+1.5*T")
    assert loaded.stated_defaults["beta"] == "1.5+1.5*T"
    assert a_manifest().stated_defaults["beta"] == 2.8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1.5+T", "beta is '1.5\\+T', but must be a finite number"),
        ("2.8", "default_beta is '2.8', which does not depend on the temperature"),
        ("1.5+1.5*T", "default_beta is '1.5\\+1.5\\*T', 3.0 at the default temperature, but defaults.beta is 2.8"),
        ("1-2*T", "-1 at temperature 1"),
        (3.0, "default_beta is 3.0, not a text"),
    ],
)
def test_a_default_beta_that_disagrees_is_refused(folder: Path, text: object, reason: str) -> None:
    edit_manifest(folder, default_beta=text)
    with pytest.raises(ManifestError, match=reason):
        m.load_manifest(folder)


def fields_of(data: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of every field, those of a list's first item included."""
    if isinstance(data, list):
        return fields_of(data[0], (*path, 0)) if data else []
    if not isinstance(data, dict):
        return []
    return [found for name, value in data.items() for found in ((*path, name), *fields_of(value, (*path, name)))]


KEYED = ("files", "libraries", "opset", "source", "weights")
"""Objects of any names."""
EVERY_FIELD = [
    path
    for path in fields_of(json.loads(a_manifest(files={"model.onnx": m.FileEntry("0" * 64, 5)}).to_json()))
    if len(path) < 2 or path[-2] not in KEYED
]


@pytest.mark.parametrize("path", EVERY_FIELD, ids=lambda path: ".".join(map(str, path)))
def test_a_manifest_without_one_of_its_fields_is_refused_by_name(folder: Path, path: tuple[str | int, ...]) -> None:
    data = json.loads((folder / m.MANIFEST_NAME).read_text())
    *outer, last = path
    place = data
    for part in outer:
        place = place[part]
    del place[last]
    (folder / m.MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(ManifestError, match=str(last).replace("_", "[_ ]")):
        m.load_manifest(folder)


def test_the_median_distance_is_a_positive_number_and_1_under_the_uniform_metric(folder: Path) -> None:
    edit_manifest(folder, verification__median_distance=2.5)
    assert m.load_manifest(folder).median_distance == 2.5
    for wrong in (0, -1.0, "2.5", True):
        edit_manifest(folder, verification__median_distance=wrong)
        with pytest.raises(ManifestError, match="median_distance is"):
            m.load_manifest(folder)
    edit_manifest(folder, verification__median_distance=None, sampler__options__metric="uniform")
    assert m.load_manifest(folder).median_distance == 1.0


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"format_version": 1}', "[" * 100_000])
def test_a_text_that_is_not_a_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / m.MANIFEST_NAME).write_text(text)
    with pytest.raises(ManifestError):
        m.load_manifest(folder)


def test_a_manifest_that_is_not_utf8_or_far_too_large_is_refused(folder: Path) -> None:
    (folder / m.MANIFEST_NAME).write_bytes(b"\xff\xfe{}")
    with pytest.raises(ManifestError, match="UTF-8"):
        m.load_manifest(folder)
    with (folder / m.MANIFEST_NAME).open("wb") as stream:
        stream.truncate((16 << 20) + 1)
    with pytest.raises(ManifestError, match="larger than"):
        m.load_manifest(folder)


def test_a_failed_save_leaves_the_old_manifest_and_no_debris(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(path.name for path in folder.iterdir())

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        m.save_manifest(folder, a_manifest(defaults=TopWParameters(lam=1.0)))
    assert sorted(path.name for path in folder.iterdir()) == before
    assert m.load_manifest(folder).defaults.lam == 2.2
