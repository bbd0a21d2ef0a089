"""Lowered recurrences equal a loop over tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
import pytest
import torch

from tests.support.mixers import literal_recurrence
from tests.support.placeholder_graphs import PlaceholderGraph
from tests.support.samples import slow, thinned
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.lowering.recurrence import CHUNK, ChunkedRecurrences, RecurrenceLayer, add_linear_attention

BATCH = 2
BOUND = 2e-5  # of the largest output: float32 sums of at most 64 columns in another order, against float64


@dataclass(frozen=True)
class Sizes:
    query_heads: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    per_key: bool = False


DENSE = Sizes(4, 4, 4, 5, 3)
SHARED_KEYS = Sizes(2, 2, 4, 5, 3)  # Mamba-2 and Qwen3-Next
PER_KEY = Sizes(4, 4, 4, 5, 3, per_key=True)  # KDA
MAMBA = Sizes(1, 1, 6, 4, 1, per_key=True)
GROUPED_SCAN = Sizes(2, 2, 6, 4, 1, per_key=True)
RG_LRU = Sizes(1, 1, 6, 1, 1)
ONE_QUERY = Sizes(1, 2, 4, 5, 3)
CASES = [
    *((rule, DENSE) for rule in ("linear", "gated", "delta", "gated_delta")),
    *((rule, sizes) for sizes in (SHARED_KEYS, PER_KEY) for rule in ("gated", "gated_delta")),
    *(("gated", sizes) for sizes in (MAMBA, GROUPED_SCAN, RG_LRU, ONE_QUERY)),
    ("delta", ONE_QUERY),
]
INPUTS = ("query", "key", "value", "decay", "beta")
FORMS = ("LinearAttention", "standard")
every_case = pytest.mark.parametrize(("rule", "sizes"), thinned(CASES, 3))
both_forms = pytest.mark.parametrize("form", FORMS)


def sample(rule: str, sizes: Sizes, sequence: int, *, strength: float = 1.0) -> dict[str, torch.Tensor | None]:
    """Random inputs: keys of length 1, as delta rules need, and log decays between 0 and -2 * strength."""
    random = torch.Generator().manual_seed(sequence)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(BATCH, *shape, generator=random)

    key = normal(sequence, sizes.key_heads, sizes.key_dim)
    decays = (sequence, sizes.heads, *([sizes.key_dim] if sizes.per_key else []))
    decay = -2 * strength * torch.rand(BATCH, *decays, generator=random)
    beta = torch.sigmoid(normal(sequence, sizes.heads))
    return {
        "query": normal(sequence, sizes.query_heads, sizes.key_dim),
        "key": key / key.norm(dim=-1, keepdim=True),
        "value": normal(sequence, sizes.heads, sizes.value_dim),
        "decay": decay if "gated" in rule else None,
        "beta": beta if "delta" in rule else None,
        "past": normal(sizes.heads, sizes.key_dim, sizes.value_dim),
        "real": torch.ones(BATCH, sequence, dtype=torch.bool),
    }


def lowered(rule: str, feeds: Mapping[str, torch.Tensor | None], form: str, scale: float = 0.5) -> PlaceholderGraph:
    def build(editor: GraphEditor, placeholder: ir.Node, values: Mapping[str, ir.Value]) -> tuple[ir.Value, ir.Value]:
        layer = RecurrenceLayer.of(placeholder)
        if form == "standard":
            return ChunkedRecurrences(editor, values["real"]).build(layer, values["past"])
        return add_linear_attention(editor, layer, values["past"], values["real"])

    inputs = {name: feeds[name] for name in INPUTS}
    others = {name: feeds[name] for name in ("past", "real")}
    return PlaceholderGraph("Recurrence", inputs, others, build, rule=rule, scale=scale)


def literal(
    rule: str, feeds: Mapping[str, torch.Tensor | None], scale: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the state after a loop over tokens, in float64."""
    numbers = [None if feeds[name] is None else feeds[name].double() for name in (*INPUTS, "past")]
    return literal_recurrence(*numbers, rule, scale, feeds["real"])


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, bound: float = BOUND) -> None:
    assert found.isfinite().all()
    assert (found - wanted).abs().max() <= bound * max(1.0, wanted.abs().max().item())


def check(rule: str, feeds: Mapping[str, torch.Tensor | None], form: str, bound: float = BOUND) -> torch.Tensor:
    """Compare the output and the state with the loop's. Returns the output."""
    output, present = lowered(rule, feeds, form).run(feeds)
    wanted, state = literal(rule, feeds)
    assert_equal(output, wanted, bound)
    assert_equal(present, state)
    return output


@both_forms
@every_case
@pytest.mark.parametrize("sequence", [slow(1), 7, slow(CHUNK)])
def test_the_recurrence_and_its_state_equal_the_loop(form: str, rule: str, sizes: Sizes, sequence: int) -> None:
    check(rule, sample(rule, sizes, sequence, strength=0.1), form)


@both_forms
@every_case
@pytest.mark.parametrize("strength", [slow(0.0), 25.0])
def test_no_decay_and_decays_of_fifty_overflow_nothing(form: str, rule: str, sizes: Sizes, strength: float) -> None:
    feeds = sample(rule, sizes, 40, strength=strength)
    if strength and feeds["decay"] is not None:
        feeds["decay"][:, ::3] = 0.0  # tokens that keep everything, between tokens that forget everything
        feeds["decay"][:, 1::3] = -50.0
    check(rule, feeds, form)


@both_forms
@every_case
def test_padding_on_either_side_changes_nothing(form: str, rule: str, sizes: Sizes) -> None:
    feeds = sample(rule, sizes, 9)
    columns = torch.arange(9)
    graph = lowered(rule, feeds, form)
    for real in (
        columns < torch.tensor([[4], [9]]),
        columns >= torch.tensor([[0], [7]]),
        columns < torch.tensor([[0], [1]]),
    ):
        feeds["real"] = real
        output, present = graph.run(feeds)
        wanted, state = literal(rule, feeds)
        assert_equal(output[real], wanted[real])
        assert_equal(present, state)


@both_forms
@every_case
def test_a_chunk_and_a_step_continue_the_state(form: str, rule: str, sizes: Sizes) -> None:
    feeds = sample(rule, sizes, 12)
    graph = lowered(rule, feeds, form)
    parts, past = [], feeds["past"]
    for columns in (slice(0, 7), slice(7, 11), slice(11, 12)):
        part = {
            name: None if feeds[name] is None else feeds[name][:, columns].contiguous() for name in (*INPUTS, "real")
        }
        output, past = graph.run({**part, "past": past})
        parts.append(output)
    wanted, state = literal(rule, feeds)
    assert_equal(torch.cat(parts, dim=1), wanted)
    assert_equal(past, state)


@both_forms
@pytest.mark.parametrize(("rule", "sizes"), [("gated", SHARED_KEYS), ("gated_delta", PER_KEY), ("gated", MAMBA)])
def test_float16_is_computed_in_float32(form: str, rule: str, sizes: Sizes) -> None:
    feeds = sample(rule, sizes, 30)
    for name in ("query", "key", "value", "beta"):
        feeds[name] = None if feeds[name] is None else feeds[name].half()
    assert check(rule, feeds, form, 1e-3).dtype == torch.float16  # the output's rounding


def test_keys_that_repeat_do_not_spoil_the_inverse() -> None:
    """All keys are equal and every beta is 1. A series in powers of the matrix would lose all digits."""
    feeds = sample("delta", DENSE, CHUNK)
    feeds["key"][:] = feeds["key"][:, :1]
    feeds["beta"].fill_(1.0)
    check("delta", feeds, "standard")


def test_standard_operators_refuse_calls_of_more_columns_than_a_chunk() -> None:
    graph = lowered("gated", sample("gated", MAMBA, 2), "standard")
    with pytest.raises(Exception, match="And"):
        graph.run(sample("gated", MAMBA, CHUNK + 1))
