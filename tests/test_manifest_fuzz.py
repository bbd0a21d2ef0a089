"""Any manifest loads or raises TopWError: fields are checked before use."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.support.mutations import mutations
from tests.test_manifest import a_manifest
from topw_deploy.cli.inspect import command
from topw_deploy.errors import ManifestError, TopWError
from topw_deploy.manifest import MANIFEST_NAME, FileEntry, Manifest, describe_files, manifest_from_json


def whole_manifest() -> Manifest:
    """With something in every field."""
    manifest = a_manifest(files={"model.onnx": FileEntry("0" * 64, 5)})
    told = {"algorithm": "default", "block_size": 32, "symmetric": True, "exclude": ["lm_head"]}
    decoder = replace(manifest.decoder, weights={"float": 12}, quantisation=told, attention="Attention")
    return replace(manifest, decoder=decoder)


@pytest.mark.slow
def test_a_manifest_with_any_value_in_a_field_is_read_or_refused_with_a_manifest_error() -> None:
    wrong, read = [], 0
    for what, text in mutations(json.loads(whole_manifest().to_json())):
        try:
            manifest = manifest_from_json(text)
            assert manifest_from_json(manifest.to_json()) == manifest
            read += 1
        except ManifestError as error:
            if len(str(error)) > 600:
                wrong.append(f"{what}: a message of {len(str(error))} characters")
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{what}: {error!r:.200}")
    assert not wrong, wrong
    assert read > 100  # not all refused for one reason


@pytest.mark.slow
def test_inspect_shows_every_manifest_that_can_be_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "model.onnx").write_bytes(b"graph")
    manifest = replace(whole_manifest(), files=describe_files(tmp_path, ["model.onnx"]))
    wrong = []
    for what, text in mutations(json.loads(manifest.to_json())):
        (tmp_path / MANIFEST_NAME).write_text(text, "utf-8")
        try:
            manifest_from_json(text)
        except TopWError:
            continue
        for arguments in ([str(tmp_path)], [str(tmp_path), "--json"]):
            outcome = CliRunner().invoke(command, arguments)
            if outcome.exception is not None and not isinstance(outcome.exception, TopWError):
                wrong.append(f"{what}: {outcome.exception!r:.200}")
    assert not wrong, wrong


@pytest.mark.parametrize("version", ["true", "2.0", "1.0", "[1]", '"1"', "null", "0", "2", "-1"])
def test_a_format_version_is_one_of_the_known_integers(version: str) -> None:
    text = whole_manifest().to_json().replace('"format_version": 1', f'"format_version": {version}')
    with pytest.raises(ManifestError, match=r"has format version .*, this topw_deploy reads 1"):
        manifest_from_json(text)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("context_length", "1000000000000000", r"decoder.context_length is 1000000000000000, not an integer in \[1, 2"),
        ("kv_form", "[]", r"decoder.kv_form is \[\], not a text"),
        ("kv_dtype", "{}", r"decoder.kv_dtype is \{\}, not a text"),
        ("num_layers", "1e9", r"decoder.num_layers is 1000000000.0, not an integer in \[1, 4096\]"),
        ("buffer_least", "4194305", r"decoder.buffer_least is 4194305, not an integer in \[0, 4194304\]"),
        ("model_type", "NaN", "NaN is not a JSON number"),
        ("model_type", '"\\ud800"', "half of a surrogate pair"),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value_and_bound(field: str, value: str, reason: str) -> None:
    data = json.loads(whole_manifest().to_json())
    data["decoder"][field] = "the place"
    with pytest.raises(ManifestError, match=reason):
        manifest_from_json(json.dumps(data).replace('"the place"', value))


def test_a_name_that_is_given_twice_is_refused() -> None:
    text = whole_manifest().to_json().replace('"kind": "decoder"', '"kind": "sampler", "kind": "decoder"')
    with pytest.raises(ManifestError, match="the name 'kind' is given twice"):
        manifest_from_json(text)


def test_an_opset_that_is_infinite_is_refused() -> None:
    text = whole_manifest().to_json().replace('"topw": 1', '"topw": Infinity')
    with pytest.raises(ManifestError, match="Infinity is not a JSON number"):
        manifest_from_json(text)
