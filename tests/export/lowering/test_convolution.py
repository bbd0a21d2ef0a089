"""Lowered convolutions equal a loop over columns, and histories the columns themselves."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import pytest
import torch

from tests.support.mixers import literal_convolution
from tests.support.placeholder_graphs import PlaceholderGraph
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.lowering.mixers import ConvolutionLayer, Convolutions

BATCH, CHANNELS, KERNEL = 3, 6, 4
BOUNDS = {torch.float32: 1e-6, torch.float16: 4e-3}  # sums of 5 terms of size 1


def sample(sequence: int, dtype: torch.dtype = torch.float32, kernel: int = KERNEL) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sequence)
    shapes = {
        "x": (BATCH, CHANNELS, sequence),
        "weight": (CHANNELS, 1, kernel),
        "bias": (CHANNELS,),
        "past": (BATCH, CHANNELS, kernel - 1),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def lowered(
    feeds: Mapping[str, torch.Tensor | None], *, contrib: bool, activation: str = "silu", padding: str = ""
) -> PlaceholderGraph:
    """A graph with a lowered convolution.

    padding: name of the input that states the padding, `lengths` or `real`; "" for no padding.
    """

    def build(editor: GraphEditor, placeholder: ir.Node, values: Mapping[str, ir.Value]) -> tuple[ir.Value, ir.Value]:
        places = {name: values.get(name) if name == padding else None for name in ("real", "lengths")}
        convolutions = Convolutions(editor, contrib=contrib, **places)
        return convolutions.build(ConvolutionLayer.of(placeholder), values["past"])

    inputs = {name: feeds[name] for name in ("x", "weight", "bias")}
    others = {name: feeds[name] for name in ("past", padding) if name}
    return PlaceholderGraph("Convolution", inputs, others, build, activation=activation)


both_forms = pytest.mark.parametrize("contrib", [True, False], ids=["operator", "standard"])


@both_forms
@pytest.mark.parametrize("sequence", [1, 2, 7, 64])
@pytest.mark.parametrize(("activation", "changes"), [("silu", {}), ("", {}), ("silu", {"bias": None})])
@pytest.mark.parametrize("kernel", [KERNEL, 2])
def test_the_convolution_and_its_state_equal_the_loop(
    contrib: bool, sequence: int, activation: str, changes: dict[str, None], kernel: int
) -> None:
    feeds = {**sample(sequence, kernel=kernel), **changes}
    output, present = lowered(feeds, contrib=contrib, activation=activation).run(feeds)
    wanted, state = literal_convolution(feeds["x"], feeds["weight"], feeds["bias"], feeds["past"], activation)
    assert (output - wanted).abs().max() <= BOUNDS[torch.float32]
    assert torch.equal(present, state)


@both_forms
def test_float16_agrees_with_float32_within_its_bits(contrib: bool) -> None:
    feeds = sample(7, torch.float16)
    output, present = lowered(feeds, contrib=contrib).run(feeds)
    wanted, state = literal_convolution(*(feeds[name].float() for name in ("x", "weight", "bias", "past")), "silu")
    assert output.dtype == torch.float16
    assert (output - wanted).abs().max() <= BOUNDS[torch.float16]
    assert torch.equal(present.float(), state)


@both_forms
@pytest.mark.parametrize("lengths", [[5, 2, 0], [1, 5, 3], [0, 0, 0]])
def test_the_state_of_a_row_padded_on_the_right_ends_at_its_last_real_column(contrib: bool, lengths: list[int]) -> None:
    feeds = {**sample(5), "lengths": torch.tensor(lengths)}
    output, present = lowered(feeds, contrib=contrib, padding="lengths").run(feeds)
    wanted, state = literal_convolution(
        feeds["x"], feeds["weight"], feeds["bias"], feeds["past"], "silu", lengths=lengths
    )
    for row, length in enumerate(lengths):
        assert torch.allclose(output[row, :, :length], wanted[row, :, :length], atol=BOUNDS[torch.float32])
    assert torch.equal(present, state)


@both_forms
def test_columns_of_padding_on_the_left_leave_a_new_sequence_unchanged(contrib: bool) -> None:
    feeds = sample(7)
    feeds["past"].zero_()
    feeds["real"] = torch.arange(7) >= torch.tensor([[0], [2], [6]])
    output, present = lowered(feeds, contrib=contrib, padding="real").run(feeds)
    for row, start in enumerate((0, 2, 6)):
        one = (feeds["x"][row : row + 1, :, start:], feeds["weight"], feeds["bias"], feeds["past"][row : row + 1])
        wanted, state = literal_convolution(*one, "silu")
        assert (output[row : row + 1, :, start:] - wanted).abs().max() <= BOUNDS[torch.float32]
        assert torch.equal(present[row : row + 1], state)


COLUMNS = 2  # before the call


def history_of(feeds: Mapping[str, torch.Tensor], padding: str = "") -> PlaceholderGraph:
    def build(editor: GraphEditor, placeholder: ir.Node, values: Mapping[str, ir.Value]) -> tuple[ir.Value, ir.Value]:
        places = {name: values.get(name) if name == padding else None for name in ("real", "lengths")}
        return Convolutions(editor, contrib=True, **places).build(ConvolutionLayer.of(placeholder), values["past"])

    others = {name: feeds[name] for name in ("past", padding) if name}
    return PlaceholderGraph("History", {"x": feeds["x"]}, others, build, columns=COLUMNS)


def numbers(sequence: int) -> dict[str, torch.Tensor]:
    """Integers that are too large for the 24 bits of a float32."""
    large = 2**40 + torch.arange(1, 1 + BATCH * (COLUMNS + sequence)).view(BATCH, 1, -1)
    return {"past": large[..., :COLUMNS].contiguous(), "x": large[..., COLUMNS:].contiguous()}


@pytest.mark.parametrize("sequence", [1, 2, 5])
def test_a_history_is_the_columns_before_and_those_of_the_call(sequence: int) -> None:
    feeds = numbers(sequence)
    output, present = history_of(feeds).run(feeds)
    assert torch.equal(output, torch.cat([feeds["past"], feeds["x"]], dim=-1))
    assert torch.equal(present, output[..., -COLUMNS:])


@pytest.mark.parametrize("lengths", [[5, 1, 0], [0, 2, 3]])
def test_the_history_of_a_row_padded_on_the_right_ends_at_its_last_real_column(lengths: list[int]) -> None:
    feeds = {**numbers(5), "lengths": torch.tensor(lengths)}
    output, present = history_of(feeds, "lengths").run(feeds)
    for row, length in enumerate(lengths):
        assert torch.equal(present[row], output[row, :, length : length + COLUMNS])


def test_padding_on_the_left_is_zero_in_a_history() -> None:
    feeds = {**numbers(5), "real": torch.arange(5) >= torch.tensor([[0], [2], [4]])}
    output, present = history_of(feeds, "real").run(feeds)
    assert torch.equal(output[..., COLUMNS:], feeds["x"] * feeds["real"][:, None])
    assert torch.equal(present, output[..., -COLUMNS:])
