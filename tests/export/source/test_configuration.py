"""The configuration of an export: the ids of special tokens, and generation settings judged by the runtime's rules."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
)

from tests.export.source.composite_models import CONFIGS
from tests.support.editing import edit_json
from tests.support.tiny_models import export, write_checkpoint
from topw_deploy.errors import ParameterError, SourceError
from topw_deploy.export.source.configuration import read_generation_settings, write_configuration
from topw_deploy.export.source.files import SPECIAL_IDS
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.source.text_decoder import context_length, rope_notices
from topw_deploy.manifest import load_manifest
from topw_deploy.runtime import TopWModel


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8")))


def written(folder: Path, output: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config.json and the generation_config.json of an export of `folder`."""
    output.mkdir(exist_ok=True)
    write_configuration(Source("model", "local", folder, folder), output, None)
    return read(output / "config.json"), read(output / "generation_config.json")


def write_ids(folder: Path, kind: str, root: dict[str, Any], part: dict[str, Any]) -> None:
    """Write the config.json of a composite model, with the ids `root` at its root and `part` in its text part."""
    CONFIGS[kind]().save_pretrained(folder)
    config = read(folder / "config.json")
    (name,) = (name for name in ("text_config", "thinker_config") if name in config)
    for place, ids in ((config, root), (config[name], part)):
        for id_name in SPECIAL_IDS:
            place.pop(id_name, None)
        place.update(ids)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_composite_models_ids_are_the_roots_then_the_text_parts_then_none(kind: str, tmp_path: Path) -> None:
    root, part = {"eos_token_id": [7, 8]}, {"eos_token_id": 9, "bos_token_id": 5}
    write_ids(tmp_path, kind, root, part)
    config, generation = written(tmp_path, tmp_path / "out")
    wanted = {"bos_token_id": 5, "eos_token_id": [7, 8], "pad_token_id": None}
    assert {name: config[name] for name in SPECIAL_IDS} == wanted
    assert generation == {name: value for name, value in wanted.items() if value is not None}
    reread = AutoConfig.from_pretrained(tmp_path / "out")
    assert {name: getattr(reread, name) for name in SPECIAL_IDS} == wanted
    # transformers derives the same from the whole model's configuration, up to the defaults of classes.
    derived = GenerationConfig.from_model_config(AutoConfig.from_pretrained(tmp_path))
    assert derived.eos_token_id == [7, 8]


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_defaults_of_a_text_class_do_not_end_a_text(kind: str, tmp_path: Path) -> None:
    write_ids(tmp_path, kind, {}, {})
    config, generation = written(tmp_path, tmp_path / "out")
    assert [config[name] for name in SPECIAL_IDS] == [None] * 3
    assert generation == {}


@pytest.mark.parametrize(
    "config",
    [
        {"thinker_config": {"text_config": {"eos_token_id": 5}}},
        {"llm_config": {"eos_token_id": 5}},
        {"eos_token_id": 5, "language_config": {"eos_token_id": 6}},
        {"eos_token_id": None, "text_config": {"eos_token_id": 5}},
    ],
)
def test_ids_are_found_in_parts_of_other_names(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "unknown"}))
    source = Source("model", "local", tmp_path, tmp_path, tmp_path / "model.onnx")
    assert read_generation_settings(source).stated == {"eos_token_id": 5}


def settings_of(folder: Path, generation: object, **config: object) -> Any:
    edit_json(folder / "config.json", model_type="llama", vocab_size=300, **config)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_generation_settings(Source("model", "local", folder, folder))


def test_generation_config_goes_before_config_and_null_states_nothing(tmp_path: Path) -> None:
    found = settings_of(tmp_path, {"eos_token_id": [1, 2], "bos_token_id": None}, eos_token_id=9, bos_token_id=3)
    assert found.stated == {"eos_token_id": [1, 2], "bos_token_id": 3}
    assert found.notices == []


def test_a_padding_id_of_minus_one_is_left_out_with_a_note(tmp_path: Path) -> None:
    found = settings_of(tmp_path, {"eos_token_id": 1, "pad_token_id": -1}, pad_token_id=-1)
    assert "pad_token_id" not in found.stated
    assert [notice.partition(",")[0] for notice in found.notices] == [
        "generation_config.json has pad_token_id -1",
        "config.json has pad_token_id -1",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token_id", "</s>"), ("eos_token_id", -1), ("eos_token_id", {"id": 3}), ("eos_token_id", [[1]]),
        ("pad_token_id", [1, 2]), ("pad_token_id", "0"), ("pad_token_id", True), ("bos_token_id", [1]),
        ("bos_token_id", "1"), ("temperature", "0.7"), ("temperature", [1.0]), ("temperature", -1),
        ("repetition_penalty", 0.0), ("repetition_penalty", "1.1"), ("max_length", 0), ("max_new_tokens", 0),
        ("max_new_tokens", "256"), ("max_new_tokens", [256]), ("do_sample", "true"), ("suppress_tokens", "1"),
        ("bad_words_ids", [3]), ("stop_strings", 3), ("no_repeat_ngram_size", -1),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_named_with_file_and_field(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=rf"generation_config\.json: {name} "):
        settings_of(tmp_path, {name: value})


@pytest.mark.parametrize("value", ["</s>", [1.5], {}])
def test_a_wrong_id_of_config_json_is_named_with_that_file(value: object, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"^config\.json: eos_token_id "):
        settings_of(tmp_path, {}, eos_token_id=value)


@pytest.mark.parametrize("content", [[], None, "x", 3])
def test_settings_that_are_not_an_object_are_refused(content: object, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"generation_config\.json holds a"):
        settings_of(tmp_path, content)


def test_ids_beyond_the_vocabulary_are_noted(tmp_path: Path) -> None:
    found = settings_of(tmp_path, {"eos_token_id": [2, 32000], "pad_token_id": 300, "bad_words_ids": [[1, 400]]})
    assert [notice.split(", but")[0] for notice in found.notices] == [
        "generation_config.json names in eos_token_id 32000",
        "generation_config.json names in pad_token_id 300",
        "generation_config.json names in bad_words_ids (1, 400)",
    ]


@pytest.mark.parametrize("stated", [{}, {"eos_token_id": None}, {"eos_token_id": []}])
def test_a_model_whose_texts_no_token_ends_is_noted(stated: dict[str, Any], tmp_path: Path) -> None:
    (notice,) = settings_of(tmp_path, stated).notices
    assert "no token ends a text" in notice


def test_wrong_settings_are_refused_before_the_model_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama_tied")
    edit_json(folder / "generation_config.json", temperature="warm")
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ParameterError, match=r"generation_config\.json: temperature is 'warm'"):
        export(folder, tmp_path / "out")


@pytest.mark.slow
def test_every_setting_is_recorded_with_its_use(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama_tied")
    stated = {"eos_token_id": [2, 7], "temperature": 0.6, "num_beams": 4, "top_k": 50, "use_cache": True, "top_p": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    report = export(folder, tmp_path / "out")
    assert load_manifest(tmp_path / "out").settings == {  # type: ignore[union-attr]
        "eos_token_id": "applied", "temperature": "applied", "num_beams": "ignored", "top_k": "ignored",
        "use_cache": "without effect", "top_p": "without effect",
    }  # fmt: skip
    assert any("sets num_beams=4, top_k=50, which has no effect" in notice for notice in report.notices)
    with pytest.warns(UserWarning, match="num_beams=4, top_k=50"), TopWModel.from_pretrained(tmp_path / "out") as model:
        ended = model.generate([5], max_new_tokens=3, allowed_token_ids=[7])
    assert ended.token_ids == [7]
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [2, 7]


@pytest.mark.parametrize(
    ("stated", "original", "expected"),
    [(256, 256, 1024), (256, None, 1024), (320, 256, 1024), (1024, 256, 1024), (2048, 256, 2048)],
)
def test_yarn_extends_the_context_by_its_factor(stated: int, original: int | None, expected: int) -> None:
    """Qwen documents a factor of 4 beside an unchanged max_position_embeddings."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    rope |= {} if original is None else {"original_max_position_embeddings": original}
    assert context_length(LlamaConfig(max_position_embeddings=stated, rope_parameters=rope)) == expected


DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
WHOLE, ORIGINAL = {"max_position_embeddings": 512}, {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "stated", "words", "context"),
    [
        (LlamaConfig, {"rope_parameters": LINEAR}, "2048 .* to 8192, which", 2048),
        (LlamaConfig, {"rope_parameters": LINEAR | {"factor": 1.0}}, None, 2048),
        (
            Gemma3TextConfig,
            {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT}},
            None,
            131_072,
        ),
        (LlamaConfig, {}, None, 2048),
        (Phi3Config, {**WHOLE, **ORIGINAL, "rope_scaling": LONG}, None, 64),
        (Phi3Config, {**WHOLE, "rope_scaling": LONG | ORIGINAL}, None, 512),
        (Phi3Config, {**ORIGINAL, "rope_scaling": LONG}, None, 64),
        (LlamaConfig, {**WHOLE, "rope_scaling": LONG | ORIGINAL}, None, 64),
        (LlamaConfig, {**WHOLE, "rope_scaling": LONG}, None, 512),
        (LlamaConfig, {**WHOLE, "rope_scaling": LINEAR | ORIGINAL | {"rope_type": "dynamic"}}, None, 512),
    ],
)  # fmt: skip
def test_a_length_of_a_rope_that_is_open_is_noted(
    kind: type[PreTrainedConfig], stated: dict[str, Any], words: str | None, context: int
) -> None:
    config = kind(hidden_size=32, num_attention_heads=4, **copy.deepcopy(stated))
    assert context_length(config) == context
    notices = rope_notices(config)
    assert len(notices) == (words is not None)
    assert words is None or re.search(words, notices[0])
