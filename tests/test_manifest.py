"""Manifests round-trip, and every invalid manifest is refused with the place and the bound."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.support.attacks import claim, refused, sparse
from tests.support.mutations import mutations
from topw_deploy import manifest as m
from topw_deploy.cli.inspect import inspect
from topw_deploy.errors import ManifestError, TopWError
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters

OUTSIDE = ("../secret", "/etc/passwd", "a/../../b", "C:/x", "a\\b", "", "a//b", "./a", "..", "a\0b", "\\\\host\\x")
"""Names that are not plain paths inside the folder."""


def a_manifest(**changes: object) -> m.DecoderManifest:
    base = m.DecoderManifest(
        source={"id": "demo", "revision": "", "route": "trace"},
        libraries={"topw_deploy": "0.1.0"},
        opset={"": 23, "topw": 1},
        inputs=(m.TensorSpec("input_ids", "int64", ("batch", "sequence")),),
        outputs=(m.TensorSpec("next_token", "int64", ("batch",)),),
        sampler=m.SamplerInfo(
            branches=True,
            vocab_size=2,
            hidden_size=2,
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
    (tmp_path / "model.onnx_data").write_bytes(b"weights" + bytes(25))
    files = m.describe_files(tmp_path, ["model.onnx", "model.onnx_data"])
    rows = m.StoredArray("model.onnx_data", 0, "float", (2, 2))
    mean, inverse_std = (m.StoredArray("model.onnx_data", offset, "float", (2,)) for offset in (16, 24))
    table = m.EmbeddingTable(rows=rows, mean=mean, inverse_std=inverse_std)
    manifest = a_manifest(files=files)
    m.save_manifest(tmp_path, replace(manifest, sampler=replace(manifest.sampler, table=table)))
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
    assert loaded == m.manifest_from_json(loaded.to_json())
    assert replace(loaded, sampler=replace(loaded.sampler, table=None)) == a_manifest(files=loaded.files)
    assert set(loaded.files) == {"model.onnx", "model.onnx_data"}
    m.check_hashes(folder, loaded)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"model\.onnx_data is listed .* but missing"),
        (b"weight", "has 6 bytes, the manifest says 32"),
        (bytes(40), "has 40 bytes, the manifest says 32"),
    ],
)
def test_a_missing_file_and_one_of_another_size_are_named(folder: Path, content: bytes | None, reason: str) -> None:
    (folder / "model.onnx_data").unlink()
    if content is not None:
        (folder / "model.onnx_data").write_bytes(content)
    with pytest.raises(ManifestError, match=reason):
        m.load_manifest(folder)


def test_a_changed_file_of_equal_size_passes_loading_but_not_the_hash(folder: Path) -> None:
    (folder / "model.onnx_data").write_bytes(b"WEIGHTS" + bytes(25))
    loaded = m.load_manifest(folder)
    with pytest.raises(ManifestError, match=r"model\.onnx_data has SHA-256"):
        m.check_hashes(folder, loaded)


def test_a_linked_folder_is_refused_even_when_its_file_has_the_right_size(folder: Path) -> None:
    """A link in place of the file: tests/runtime/test_special_files.py."""
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "weights").write_bytes(b"weights")
    (folder / "sub").symlink_to(outside)
    claim(folder, "sub/weights", 7)
    with pytest.raises(ManifestError, match="symbolic link"):
        m.load_manifest(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format_version": 2}, "has format version 2, this topw_deploy reads 1; export the model again"),
        *(({"format_version": wrong}, "has format version") for wrong in ("1", True, 1.0, None, [1])),
        ({"kind": "sampler"}, "unknown field `decoder`"),
        ({"kind": "both"}, "Invalid value 'both' - at `$.kind`"),
        ({"decoder": None}, "got `null` - at `$.decoder`"),
        ({"decoder__num_layers": 0}, "Expected `int` >= 1 - at `$.decoder.num_layers`"),
        ({"decoder__num_layers": 1e9}, "got `float` - at `$.decoder.num_layers`"),
        ({"decoder__context_length": 10**15}, "Expected `int` <= 2147483647 - at `$.decoder.context_length`"),
        ({"decoder__buffer_least": 4194305}, "Expected `int` <= 4194304 - at `$.decoder.buffer_least`"),
        ({"decoder__states": []}, "length >= 1 - at `$.decoder.states`"),
        ({"decoder__states": [{}]}, "missing required field `layer` - at `$.decoder.states[0]`"),
        ({"decoder__left_padding": "yes"}, "got `str` - at `$.decoder.left_padding`"),
        ({"decoder__target": "tpu"}, "Invalid enum value 'tpu' - at `$.decoder.target`"),
        ({"decoder__weights": {"float": "many"}}, "got `str` - at `$.decoder.weights[...]`"),
        ({"decoder__quantisation": {"bits": [4]}}, "got `int` - at `$.decoder.quantisation[...][0]`"),
        ({"decoder__least_onnxruntime": "new"}, "matching regex"),
        ({"decoder__note": 1}, "unknown field `note`"),
        ({"sampler__options__metric": "euclid"}, "metric is 'euclid', but must be one of"),
        ({"sampler__vocab_size": "4096"}, "got `str` - at `$.sampler.vocab_size`"),
        ({"sampler__rules": ["min_p", "top_w"]}, "at `$.sampler`"),
        ({"defaults__temperature": -1}, "temperature is -1"),
        ({"files": {}}, "does not list model.onnx"),
        ({"files__model.onnx": {"sha256": "xyz", "size": 5}}, "matching regex '^[0-9a-f]{64}"),
        ({"files__model.onnx": {"sha256": "0" * 64, "size": -5}}, "Expected `int` >= 0 - at `$.files[...].size`"),
        *(({"files__" + name: {"sha256": "0" * 64, "size": 0}}, "at `key` in `$.files`") for name in OUTSIDE),
        ({"inputs": [{"name": "x"}]}, "missing required field `dtype` - at `$.inputs[0]`"),
        ({"verification__status": "good"}, "Invalid enum value 'good'"),
        ({"verification__median_distance": 0}, "Expected `float` > 0.0 - at `$.verification.median_distance`"),
        ({"default_beta": "1.5+T"}, "beta is '1.5+T', but must be a finite number"),
        ({"default_beta": "1.5+1.5*T"}, "default_beta is '1.5+1.5*T', which is not defaults.beta 2.8"),
        ({"sampler__table__rows__shape": [1, 2]}, "the table's rows is not an array [2, 2]"),
        ({"sampler__table__bits": 4}, "the table's rows is not an array [2, 1]"),
        ({"sampler__table__scales": {}}, "missing required field `file`"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_by_its_place_and_bound(folder: Path, changes: dict[str, object], reason: str) -> None:
    edit_manifest(folder, **changes)
    with refused(ManifestError, re.escape(reason)):
        m.load_manifest(folder)


@pytest.mark.slow
def test_a_manifest_with_any_value_in_a_field_is_read_or_refused(folder: Path) -> None:
    """`topw inspect` shows every one that is read."""
    wrong, read = [], 0
    for what, text in mutations(json.loads((folder / m.MANIFEST_NAME).read_text())):
        (folder / m.MANIFEST_NAME).write_text(text, "utf-8")
        try:
            manifest = m.manifest_from_json(text)
            assert m.manifest_from_json(manifest.to_json()) == manifest
            read += 1
        except ManifestError as error:
            wrong += [f"{what}: {len(str(error))} characters"] if len(str(error)) > 600 else []
            continue
        for arguments in ([str(folder)], [str(folder), "--json"]):
            outcome = CliRunner().invoke(inspect, arguments)
            if outcome.exception is not None and not isinstance(outcome.exception, TopWError):
                wrong.append(f"{what}: {outcome.exception!r:.200}")
    assert not wrong, wrong
    assert read > 100  # not all refused for one reason


def test_a_default_beta_that_depends_on_the_temperature_is_kept_as_text_beside_its_number(folder: Path) -> None:
    defaults = TopWParameters(beta=4.5, temperature=2.0)
    files = m.load_manifest(folder).files
    m.save_manifest(folder, a_manifest(files=files, defaults=defaults, default_beta="1.5+1.5*T"))
    loaded = m.load_manifest(folder)
    assert (loaded.defaults.beta, loaded.default_beta) == (4.5, "1.5+1.5*T")
    assert loaded.stated_defaults["beta"] == "1.5+1.5*T"
    assert a_manifest().stated_defaults["beta"] == 2.8


def test_the_median_distance_is_1_under_the_uniform_metric(folder: Path) -> None:
    edit_manifest(folder, verification__median_distance=2.5)
    assert m.load_manifest(folder).median_distance == 2.5
    edit_manifest(folder, verification__median_distance=None, sampler__options__metric="uniform")
    assert m.load_manifest(folder).median_distance == 1.0


BOMBS: dict[str, bytes] = {
    "nothing": b"",
    "another type": b"[]",
    "lists in lists": b"[" * 1_000_000,
    "objects in objects": b'{"a":' * 1_000_000,
    "an integer of many digits": b'{"format_version": 1' + b"0" * 1_000_000 + b"}",
    "NaN": b'{"format_version": NaN}',
    "half a surrogate pair in UTF-8": b'{"\xed\xa0\x80": 1}',
    "UTF-16": '{"format_version": 1}'.encode("utf-16"),
    "zero bytes": bytes(1000),
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_file_that_is_not_a_manifest_is_refused(folder: Path, content: bytes) -> None:
    (folder / m.MANIFEST_NAME).write_bytes(content)
    with refused(ManifestError, "is malformed|has format version"):
        m.load_manifest(folder)


def test_a_manifest_of_a_terabyte_is_not_read(folder: Path) -> None:
    sparse(folder / m.MANIFEST_NAME, 1 << 40)
    with refused(ManifestError, "is larger than 16777216 bytes"):
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
