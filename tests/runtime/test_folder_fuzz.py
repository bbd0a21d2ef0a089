"""For any content of a folder's JSON files, opening and generating raise only TopWError."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.mutations import mutations
from tests.support.toy_model import Toy, export
from topw_deploy.errors import TopWError
from topw_deploy.manifest import DecoderManifest, ModelFolder, describe_files
from topw_deploy.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.long

WORKER = Path(__file__).with_name("fuzz_worker.py")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
EVERY_PARAMETER = {
    "max_new_tokens": 4, "max_length": 90, "min_new_tokens": 1, "min_length": 1, "do_sample": True,
    "eos_token_id": [1, 2], "pad_token_id": 2, "bos_token_id": 0, "stop_strings": ["stop"], "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": -1.5}, "suppress_tokens": [7],
    "bad_words_ids": [[8, 9]], "no_repeat_ngram_size": 3, "temperature": 0.9, "lam": 2.0, "beta": 2.5,
    "init_top_p": 0.9, "geom_scale": 1.0, "selection_temperature": 0.5, "top_k": 50,
}  # fmt: skip


SMALL_TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [{"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": True}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "end_of_word_suffix": None, "fuse_unk": False,
              "continuing_subword_prefix": None, "byte_fallback": False,
              "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": ["a b"]},
}  # fmt: skip


def fuzz(folder: Path, name: str, within: str = "") -> dict[str, Any]:
    """The worker's report after mutating `name` in fields whose paths begin with `within`."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, str(WORKER), str(folder), name, within]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


@pytest.mark.skipif(sys.platform != "linux", reason="bounds the memory of a process")
@pytest.mark.parametrize("form", ["concat", "scatter", "grouped", "shared"])
def test_whatever_a_manifest_says_only_typed_errors_leave_a_generation(toy: Toy, tmp_path: Path, form: str) -> None:
    folder = export(tmp_path / form, toy, form=form, buffer_step=8 if form == "scatter" else 0)
    outcome = fuzz(folder, "topw_manifest.json", "" if form == "concat" else "decoder")
    assert outcome["loaded"] > 10
    assert not outcome["wrong"], "\n".join(outcome["wrong"])


@pytest.mark.skipif(sys.platform != "linux", reason="bounds the memory of a process")
@pytest.mark.parametrize(
    "name", ["generation_config.json", "config.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_whatever_a_side_file_says_only_typed_errors_leave_a_generation(toy: Toy, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    export(folder, toy, generation_config=EVERY_PARAMETER)
    contents: dict[str, Any] = {
        "config.json": {"model_type": "toy", "text_config": {"eos_token_id": [1], "bos_token_id": 0}},
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>"},
            "chat_template": [{"name": "default", "template": TEMPLATE}],
        },
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"},
    }
    if name in contents:
        (folder / name).write_text(json.dumps(contents[name]), "utf-8")
        manifest = json.loads((folder / "topw_manifest.json").read_text("utf-8"))
        if name == "config.json":  # fallback of the generation config
            del manifest["files"]["generation_config.json"]
        (folder / "topw_manifest.json").write_text(json.dumps(manifest), "utf-8")
    outcome = fuzz(folder, name)
    assert outcome["loaded"] > 10
    assert not outcome["wrong"], "\n".join(outcome["wrong"])


def test_whatever_a_tokenizer_says_only_typed_errors_leave_it(toy: Toy, tmp_path: Path) -> None:
    folder = export(tmp_path / "folder", toy)
    wrong, used = [], 0
    for what, text in mutations(SMALL_TOKENIZER):
        (folder / "tokenizer.json").write_text(text, "utf-8")
        manifest = json.loads((folder / "topw_manifest.json").read_text("utf-8"))
        (entry,) = describe_files(folder, ["tokenizer.json"]).values()
        manifest["files"]["tokenizer.json"] = {"sha256": entry.sha256, "size": entry.size}
        (folder / "topw_manifest.json").write_text(json.dumps(manifest), "utf-8")
        try:
            tokenizer = Tokenizer(ModelFolder(folder, DecoderManifest))
            tokenizer.decode([*tokenizer.encode("ab"), 0, 1, 2, 3, 999])
            used += 1
        except TopWError:
            continue
        except BaseException as error:  # noqa: BLE001  # Rust panics are not Exceptions
            wrong.append(f"{what}: {error!r:.200}")
    assert used > 10
    assert not wrong, "\n".join(wrong)
