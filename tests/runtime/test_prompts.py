"""Prompts as arrays, tensors and tokenizer outputs."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.toy_model import PAD, VOCAB, byte_ids
from tests.test_layers import HEAVY, loaded_by
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.prepare import read_prompts

IDS = byte_ids("hello")
SETTINGS = {"max_new_tokens": 6, "temperature": 3.0, "lam": 0.1, "seed": 5}


def left_padded(rows: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    width = max(map(len, rows))
    return (
        [[PAD] * (width - len(row)) + row for row in rows],
        [[0] * (width - len(row)) + [1] * len(row) for row in rows],
    )


def test_arrays_of_one_and_of_two_dimensions(model: TopWModel) -> None:
    expected = model.generate(IDS, **SETTINGS)
    assert model.generate(np.array(IDS, np.int32), **SETTINGS) == expected
    assert model.generate(np.array([IDS]), **SETTINGS) == [expected]
    assert model.generate(list(np.array(IDS)), **SETTINGS) == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_masked_tokens_are_removed(model: TopWModel, side: str) -> None:
    rows = [byte_ids("hello"), byte_ids("ab")]
    ids, mask = left_padded(rows)
    if side == "right":
        ids, mask = [row[::-1] for row in ids], [row[::-1] for row in mask]
        rows = [row[::-1] for row in rows]
    expected = model.generate(rows, **SETTINGS)
    assert [r.prompt_tokens for r in expected] == [5, 2]
    for m in (mask, np.array(mask), np.array(mask, bool), np.array(mask, np.float32)):
        assert model.generate(ids, attention_mask=m, **SETTINGS) == expected
        assert model.generate(input_ids=np.array(ids), attention_mask=m, **SETTINGS) == expected
        assert model.generate({"input_ids": ids, "attention_mask": m}, **SETTINGS) == expected
    pieces = model.stream(input_ids=ids, attention_mask=mask, **SETTINGS)
    assert [p.result for p in pieces if p.result] == expected


def test_zeros_as_token_types_and_descriptions_change_nothing(model: TopWModel) -> None:
    extra = {"token_type_ids": [0] * 5, "special_tokens_mask": [0] * 5, "offset_mapping": [(0, 1)] * 5, "length": 5}
    expected = model.generate(IDS, **SETTINGS)
    assert model.generate(UserDict(input_ids=IDS, **extra), **SETTINGS) == expected
    assert model.generate(input_ids=IDS, attention_mask=[1] * 5, token_type_ids=[0] * 5, **SETTINGS) == expected


@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        (None, {}, "there is no prompt; give a text, token ids"),
        ("a", {"input_ids": [5]}, "a prompt and input_ids are both given"),
        ("a", {"attention_mask": [1]}, "the prompt is a text, but attention_mask is for token ids"),
        (
            [5, 6],
            {"attention_mask": [1]},
            r"attention_mask is \[1\] for the prompt, but must be 0 or 1 for each of its 2",
        ),
        ([[5, 6]], {"attention_mask": [1, 1]}, "attention_mask does not fit the 1 prompts"),
        ([[5], [5, 6, 7]], {"attention_mask": [[1], [1, 0, 1]]}, "masks tokens in the middle of prompt 1"),
        ([5, 6], {"attention_mask": [1, 2]}, r"attention_mask is \[1, 2\] for the prompt, but must be 0 or 1"),
        ([5, 6], {"attention_mask": [0, 0]}, "the prompt is empty"),
        ({"input_ids": [5], "pixel_values": [1]}, {}, "a decoder cannot read pixel_values"),
        (np.zeros((1, 2, 3), int), {}, "neither a text nor a list of token ids"),
        ([["a"]], {}, "neither a text nor a list of token ids"),
        (["ok", [VOCAB]], {}, f"prompt 1 holds the token id {VOCAB}, but ids go from 0 to {VOCAB - 1}"),
        ("half \ud83d", {}, "half of a surrogate pair"),
    ],
    ids=str,
)
def test_prompts_and_masks_that_do_not_fit_are_errors(
    model: TopWModel, prompt: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        model.generate(prompt, **given)


class OnADevice:
    """A device tensor with the methods that the runtime uses."""

    dtype, ndim = "int64", 2

    def tolist(self) -> list[list[int]]:
        return [IDS]

    def __array__(self, *_: Any) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_a_tensor_on_a_device_is_read_through_tolist() -> None:
    assert read_prompts(OnADevice()) == ([IDS], False)


def test_torchs_tensors_and_transformers_tokenizers(model: TopWModel, toy_folder: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    expected = model.generate(["hello", "ab"], **SETTINGS)
    assert model.generate(torch.tensor(IDS), **SETTINGS) == expected[0]
    assert model.generate(torch.tensor([IDS]), **SETTINGS) == expected[:1]
    assert model.generate([torch.tensor(IDS), torch.tensor(byte_ids("ab"))], **SETTINGS) == expected
    assert model.generate(list(torch.tensor(IDS)), **SETTINGS) == expected[0]

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(toy_folder / "tokenizer.json"), pad_token="<pad>", eos_token="</s>"
    )
    assert model.generate(tokenizer("hello"), **SETTINGS) == expected[0]
    assert model.generate(**tokenizer("hello"), **SETTINGS) == expected[0]
    for side in ("left", "right"):
        tokenizer.padding_side = side
        for kind in (None, "np", "pt"):
            inputs = tokenizer(["hello", "ab"], padding=True, return_tensors=kind)
            assert model.generate(inputs, **SETTINGS) == expected
            assert model.generate(**inputs, **SETTINGS) == expected
            assert model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **SETTINGS) == expected


def test_booleans_and_floats_of_torch_are_not_token_ids(model: TopWModel) -> None:
    torch = pytest.importorskip("torch")
    for prompt in (torch.tensor([True, False]), [torch.tensor(True)], torch.tensor([[1.0, 2.0]])):
        with pytest.raises(PromptError, match="at position 0, but token ids are integers"):
            model.generate(prompt)
    for given in ({"eos_token_id": torch.tensor(True)}, {"suppress_tokens": torch.tensor([True])}):
        with pytest.raises(ParameterError, match="is True, but must be an integer"):
            model.generate("a", **given)
    with pytest.raises(ParameterError, match=r"is tensor\(True\), but must be an integer"):
        model.generate("a", suppress_tokens=[torch.tensor(True)])
    banned = torch.arange(3, VOCAB - 1)
    assert model.generate("a", suppress_tokens=banned, max_new_tokens=2).token_ids == [VOCAB - 1] * 2


@pytest.mark.slow
def test_reading_tensors_loads_no_tensor_library() -> None:
    statement = "import numpy; from topw_deploy.runtime.prepare import read_prompts; read_prompts(numpy.ones(2, int))"
    assert not loaded_by(statement) & HEAVY
