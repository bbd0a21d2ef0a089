"""Weights are rounded for a text, one product after the other, in the torch model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.tiny_models import make_model, write_tokenizer
from topw_deploy.errors import ParameterError
from topw_deploy.export.quantise import Quantisation, calibration
from topw_deploy.export.quantise.blocks import QuantisedWeight, decode_blocks, row_digest
from topw_deploy.export.quantise.calibration import (
    CALIBRATION_FILE,
    TextCalibration,
    calibrate,
    calibration_rows,
    measure_effects,
    round_for_tokens,
)
from topw_deploy.export.quantise.choice import RoundedRows, RowFormat, rounded_blocks
from topw_deploy.export.source.checkpoint import load_unread
from topw_deploy.export.trace.experts import expert_matrices
from topw_deploy.progress import SILENT

SCHEME = Quantisation(bits=4, block_size=16)
ROWS = np.random.default_rng(0).integers(3, 300, (8, 64))


def digests(weight: torch.Tensor) -> list[bytes]:
    return [row_digest(row) for row in weight.detach().numpy()]


def calibrated(model: PreTrainedModel, weights: list[torch.Tensor]) -> RoundedRows:
    wanted = {digest: RowFormat(SCHEME.block_size, 4) for weight in weights for digest in digests(weight)}
    return calibrate(model, ROWS, wanted, SCHEME, lambda _rows: None)


def linear_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.named_parameters() if name.endswith("proj.weight")}


def relative_loss(model: PreTrainedModel, weights: dict[str, torch.Tensor], rounded: dict[str, np.ndarray]) -> float:
    """The mean squared difference of hidden states with rounded weights, relative to their mean square."""
    ids = torch.from_numpy(ROWS)
    with torch.no_grad():
        exact = model.base_model(input_ids=ids).last_hidden_state
        before = {name: weight.clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.copy_(torch.from_numpy(rounded[name]))
        found = model.base_model(input_ids=ids).last_hidden_state
        for name, weight in weights.items():
            weight.copy_(before[name])
    return float((found - exact).square().mean() / exact.square().mean())


def test_a_model_loses_less_on_the_text_than_with_rounding_to_nearest() -> None:
    model = make_model("llama_tied")
    weights = linear_weights(model)
    rows = calibrated(model, list(weights.values()))
    fed, nearest = {}, {}
    for name, weight in weights.items():
        fed[name] = decode_blocks(rounded_blocks(rows, digests(weight)), 4, weight.shape[1])
        array = weight.detach().numpy()
        read = lambda start, stop, array=array: array[start:stop]  # noqa: E731
        nearest[name] = QuantisedWeight.rounded(read, array.shape, array.dtype, 16, SCHEME).values()
    assert relative_loss(model, weights, fed) < 0.8 * relative_loss(model, weights, nearest)


def test_rows_of_joined_matrices_are_found_in_any_order() -> None:
    model = make_model("qwen2")
    layer = model.base_model.layers[1].self_attn
    parts = [layer.q_proj.weight, layer.k_proj.weight]
    rows = calibrated(model, parts)
    keys = [digest for part in parts for digest in digests(part)]
    order = np.random.default_rng(1).permutation(len(keys))
    whole, shuffled = rounded_blocks(rows, keys), rounded_blocks(rows, [keys[place] for place in order])
    np.testing.assert_array_equal(decode_blocks(whole, 4, 32)[order], decode_blocks(shuffled, 4, 32))
    assert rows.keys().isdisjoint(digests(layer.v_proj.weight))  # nobody wanted it


def test_the_rows_of_a_matrix_may_have_different_bits() -> None:
    model = make_model("llama_tied")
    weight = model.base_model.layers[0].mlp.up_proj.weight
    names = digests(weight)
    wanted = {name: RowFormat(16, 8 if place % 2 else 4) for place, name in enumerate(names)}
    rows = calibrate(model, ROWS, wanted, SCHEME, lambda _rows: None)
    few, many = (
        decode_blocks(rounded_blocks(rows, names[place::2]), bits, weight.shape[1]) for place, bits in enumerate((4, 8))
    )
    exact = weight.detach().numpy()
    assert np.abs(many - exact[1::2]).max() < 0.2 * np.abs(few - exact[::2]).max()


def test_an_effect_is_the_change_of_the_layers_output_with_one_matrix_rounded_to_nearest() -> None:
    model = make_model("llama_tied")
    layer = model.base_model.layers[1]
    value, query = layer.self_attn.v_proj.weight, layer.self_attn.q_proj.weight
    wanted = {digest: 16 for weight in (value, query) for digest in digests(weight)}
    effects = measure_effects(model, ROWS, wanted, SCHEME)
    assert effects.keys() == wanted.keys()
    outputs: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda *call: outputs.append(call[2]))
    with torch.no_grad():
        model(input_ids=torch.from_numpy(ROWS))
        array = value.detach().numpy().copy()
        read = lambda start, stop: array[start:stop]  # noqa: E731
        value.copy_(torch.from_numpy(QuantisedWeight.rounded(read, array.shape, array.dtype, 16, SCHEME).values()))
        model(input_ids=torch.from_numpy(ROWS))
    handle.remove()
    moved = (outputs[1] - outputs[0]).square().sum(-1) / outputs[0].square().sum(-1)
    found = {name: effects[name] for name in wanted if name in list(wanted)[: len(array)]}
    assert sum(found.values()) == pytest.approx(float(moved.mean()), rel=1e-4)


def test_a_product_is_rounded_for_the_inputs_that_rounded_products_give_it() -> None:
    model = make_model("llama_tied")
    up, down = (getattr(model.base_model.layers[0].mlp, f"{name}_proj").weight for name in ("up", "down"))
    alone, behind = (rounded_blocks(calibrated(model, parts), digests(down)) for parts in ([down], [up, down]))
    assert not np.array_equal(alone.codes, behind.codes)


def test_a_row_keeps_its_direction_however_far_its_inputs_moved() -> None:
    """Correcting all of it turned rows of a real model by up to 87 degrees."""
    rng = np.random.default_rng(0)
    weight, inputs, mix = (torch.from_numpy(rng.standard_normal((rows, 32), np.float32)) for rows in (16, 512, 32))
    exact = inputs @ (20 * mix)
    data = round_for_tokens(weight, exact, inputs, exact @ weight.T, 16, SCHEME, np.dtype(np.float32))
    assert torch.cosine_similarity(torch.from_numpy(decode_blocks(data, 4, 32)), weight).min() > 0.9


def test_every_expert_that_tokens_reach_is_rounded() -> None:
    model = make_model("qwen3_moe")
    matrices = [matrix for module in model.modules() for matrix in expert_matrices(module)]
    rows = calibrated(model, [matrix.reshape(-1, matrix.shape[2]) for matrix in matrices])
    found = [rows.keys() >= set(digests(matrix[expert])) for matrix in matrices for expert in range(len(matrix))]
    assert len(found) == 16
    assert sum(found) >= 12  # of random routers, some experts get few tokens


def test_products_of_transposed_weights_are_rounded() -> None:
    model = make_model("gpt2")
    weight = model.base_model.h[0].mlp.c_fc.weight.T  # Conv1D
    assert calibrated(model, [weight]).keys() >= set(digests(weight))


def test_weights_are_read_from_their_files_and_the_head_is_not_computed(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _ = load_unread(checkpoint("llama_untied"), "float32")
    weight = next(value for name, value in model.named_parameters() if name.endswith("down_proj.weight")).values()
    head = model.get_output_embeddings()
    monkeypatch.setattr(head, "forward", lambda *_: pytest.fail("the head was computed"))
    assert calibrated(model, [weight]).keys() >= set(digests(weight))


def test_activations_that_are_not_finite_leave_a_weight_to_rounding_to_nearest() -> None:
    model = make_model("llama_tied")
    with torch.no_grad():
        model.base_model.layers[1].input_layernorm.weight.fill_(torch.inf)
    query = model.base_model.layers[1].self_attn.q_proj.weight
    assert not calibrated(model, [query])


def test_rows_are_spread_over_the_text_and_start_with_the_tokenizers_prefix(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    text = "".join(chr(97 + number % 26) for number in range(26 * 5000))
    rows = calibration_rows(tmp_path / "tokenizer.json", text, 320, 256)
    assert rows.shape == (16, 256)
    short = calibration_rows(tmp_path / "tokenizer.json", "a b", 320, 256)
    assert len(short) == 1


def text_calibration(folder: Path, text: str) -> TextCalibration:
    write_tokenizer(folder)
    return TextCalibration(make_model("llama_tied"), folder, Quantisation(bits=4, calibration=text), False, SILENT)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), (b"\xff\xfe\x00", "cannot be read"), (b"too short", "needs at least 256")],
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(ParameterError, match=words):
        text_calibration(tmp_path, str(tmp_path / "text")).effects({})


def test_the_bundled_text_has_many_kinds_of_text() -> None:
    text = CALIBRATION_FILE.read_text("utf-8")
    assert len(text) > 15_000
    assert all(sample in text for sample in ("def ", "SELECT", "<html", "Der ", "今日", "Сегодня", "يقع"))
    assert Quantisation(bits=4).calibration == calibration.BUNDLED
