"""Imports of folders of optimum, mobius and onnxruntime-genai's builder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export import export_model
from topw_deploy.export.foreign import load_decoder
from topw_deploy.manifest import DecoderInfo, load_manifest
from topw_deploy.runtime import TopWModel

from .models import CONTEXT, PEERS, WINDOW

pytestmark = pytest.mark.long

PROMPT = [5, 9, 30, 44, 61]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
# Equal to torch at any length; the rest omit parts of the model or are quantised.
FAITHFUL = (
    "optimum-llama-tied",
    "optimum-llama-untied",
    "optimum-mistral",
    "optimum-gpt2",
    "mobius-llama-tied",
    "mobius-llama-untied",
    "mobius-gemma3",
    "mobius-cpu-llama-tied",
    "mobius-cpu-mistral",
    "genai-llama-tied",
    "genai-llama-untied",
    "genai-gemma2",
)
VERIFIED = (
    "optimum-llama-tied",
    "mobius-llama-untied",
    "mobius-cpu-mistral",
    "genai-llama-untied",
    "genai-gemma2",
    "genai-mistral",
    "genai-fp16-llama-tied",
    "genai-int4-llama-tied",
    "genai-int4-llama-untied",
)
PADDED_RIGHT = ("mobius-cpu-mistral", "genai-llama-untied", "genai-fp16-llama-tied", "genai-int4-llama-untied")
RUNNABLE = sorted(set(PEERS) - {"mobius-static-llama-tied"})


def described(path: Path) -> DecoderInfo:
    decoder = load_manifest(path).decoder
    assert decoder is not None
    return decoder


@pytest.mark.parametrize("name", VERIFIED)
def test_a_real_folder_is_imported_and_verified(imported: Callable, name: str) -> None:
    report = imported(name, verify=True).report
    assert report.verification.status == "passed"
    names = {check.name for check in report.verification.checks}
    assert names >= {"prefill logits", "decode logits", "chunked prefill logits", "sampler kept sets"}


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_cache_is_described_as_the_graph_has_it(imported: Callable, name: str) -> None:
    export = imported(name)
    decoder = described(export.path)
    in_place = name.startswith(("genai", "mobius-cpu"))
    assert decoder.kv_form == ("shared" if in_place else "concat")
    assert decoder.ragged_chunks is not in_place
    operator = {"optimum": "", "mobius": "Attention", "genai": "GroupQueryAttention"}[export.source.peer.maker]
    assert decoder.attention == ("GroupQueryAttention" if in_place else operator)
    assert decoder.kv_dtype == ("float16" if "fp16" in name else "float")
    assert decoder.buffer_least == (WINDOW if name == "genai-gemma2" else 0)
    opset = {"optimum": 18, "mobius": 24, "genai": 22}[export.source.peer.maker]
    assert load_manifest(export.path).opset[""] == opset


@pytest.mark.parametrize("name", FAITHFUL)
def test_greedy_tokens_are_torchs_past_every_window(imported: Callable, torch_greedy: Callable, name: str) -> None:
    export = imported(name)
    wanted = torch_greedy(export.source.checkpoint, PROMPT, 3 * WINDOW)
    with TopWModel.from_pretrained(export.path) as model:
        assert model.generate(PROMPT, max_new_tokens=len(wanted), **GREEDY).token_ids == wanted


@pytest.mark.parametrize("name", ["genai-int4-llama-tied", "genai-int4-llama-untied", "genai-fp16-llama-tied"])
def test_greedy_tokens_of_half_and_quarter_precision_are_their_makers(
    imported: Callable, own_tool: Callable, name: str
) -> None:
    export = imported(name)
    ((wanted,),) = own_tool("genai", [export.source.path], [PROMPT], 30)
    with TopWModel.from_pretrained(export.path) as model:
        found = model.generate(PROMPT, max_new_tokens=30, temperature=0.0).token_ids
    assert found == wanted[: len(found)]
    assert len(found) == len(wanted) or found[-1] == 2  # end of sequence


@pytest.mark.parametrize("name", sorted(set(PADDED_RIGHT) & set(FAITHFUL)))
def test_prompts_of_different_lengths_share_a_batch_and_give_torchs_tokens(
    imported: Callable, torch_greedy: Callable, name: str
) -> None:
    export = imported(name, verify=True)
    prompts = [[(7 * i + row) % 300 + 3 for i in range(n)] for row, n in enumerate((2 * WINDOW + 5, 1, WINDOW, 3))]
    wanted = [torch_greedy(export.source.checkpoint, prompt, WINDOW) for prompt in prompts]
    for chunk in (None, 7):
        with TopWModel.from_pretrained(export.path, prefill_chunk=chunk) as model:
            found = model.generate(prompts, max_new_tokens=[WINDOW, 3, WINDOW, WINDOW - 1], **GREEDY)
        for row, tokens in enumerate(found):
            assert tokens.token_ids == wanted[row][: len(tokens.token_ids)]
        assert [len(row.token_ids) for row in found] == [WINDOW, 3, WINDOW, WINDOW - 1]


@pytest.mark.parametrize("name", PADDED_RIGHT)
def test_a_batch_padded_on_the_right_is_part_of_the_verification(imported: Callable, name: str) -> None:
    export = imported(name, verify=True)
    assert described(export.path).right_padding
    (check,) = (c for c in export.report.verification.checks if c.name == "right-padded batch logits")
    assert check.passed


@pytest.mark.parametrize("name", ["genai-llama-tied", "mobius-cpu-mistral", "genai-gemma2"])
def test_a_batch_and_pieces_of_a_prompt_draw_the_same_tokens(imported: Callable, name: str) -> None:
    """onnxruntime refuses several new tokens per row after a past, so the runtime runs single rows."""
    prompts = [[(7 * i + row) % 300 + 3 for i in range(2 * WINDOW + 5)] for row in range(3)]
    setting = {"seed": [1, 2, 3], "lam": 0.5, "temperature": 1.5, "ignore_eos": True, "max_new_tokens": 12}
    path = imported(name).path
    with TopWModel.from_pretrained(path) as whole, TopWModel.from_pretrained(path, prefill_chunk=7) as pieces:
        wanted = [
            whole.generate(prompt, **{**setting, "seed": seed}).token_ids
            for prompt, seed in zip(prompts, setting["seed"], strict=True)
        ]
        assert [row.token_ids for row in whole.generate(prompts, **setting)] == wanted
        assert [row.token_ids for row in pieces.generate(prompts, **setting)] == wanted


def test_a_window_kept_alone_gets_a_buffer_of_its_size_for_short_requests(
    imported: Callable, torch_greedy: Callable
) -> None:
    """onnxruntime-genai's loop refuses a max_length below this graph's window."""
    export = imported("genai-gemma2")
    wanted = torch_greedy(export.source.checkpoint, PROMPT, 3)
    with TopWModel.from_pretrained(export.path, max_length=8) as model:
        assert model.generate(PROMPT, max_new_tokens=3, **GREEDY).token_ids == wanted


@pytest.mark.parametrize("name", RUNNABLE)
def test_sequences_end_where_the_graph_does(imported: Callable, name: str) -> None:
    export = imported(name)
    ignores_its_window = name in ("genai-mistral", "mobius-mistral")
    length = described(export.path).context_length
    assert length == (WINDOW if ignores_its_window else CONTEXT)
    notices = " ".join(export.report.notices)
    assert ("ignores the model's sliding window" in notices) is ignores_its_window
    assert ("table of positions has 256 rows" in notices) is name.startswith("mobius-cpu")
    assert ("does not apply the soft cap" in notices) is (name == "optimum-gemma2")
    with TopWModel.from_pretrained(export.path) as model:
        assert len(model.generate(PROMPT, max_new_tokens=2 * CONTEXT, **GREEDY).token_ids) == length - len(PROMPT)


@pytest.mark.parametrize("name", ["genai-mistral", "genai-gemma2"])
def test_the_models_own_configuration_says_the_same_of_its_window(
    folder: Callable, imported: Callable, name: str
) -> None:
    """The builder writes only genai_config.json; --tokenizer names a folder with config.json."""
    source = folder(name)
    decoder = load_decoder(source.path / "model.onnx", source.checkpoint)
    assert decoder.info.context_length == described(imported(name).path).context_length
    assert list(decoder.notices) == [note for note in imported(name).report.notices if "window" in note]


def test_a_cache_in_mobiuss_static_layout_is_refused_by_name(folder: Callable, tmp_path: Path) -> None:
    static = folder("mobius-static-llama-tied")
    with pytest.raises(UnsupportedModelError, match="without --static-cache"):
        export_model(static.path, tmp_path / "out", tokenizer=static.checkpoint)
