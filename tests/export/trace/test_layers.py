"""One layer of each kind is traced; the others are copies, with the graph that their own trace would have."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)
from transformers.models.llama import modeling_llama

from tests.support.tiny_models import COMMON, ONE_LAYER, VOCAB, make_model
from topw_deploy.export.trace.layers import RepeatedLayers
from topw_deploy.export.trace.trace import trace

FOUR = {**COMMON, "num_hidden_layers": 4}
MODELS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=256),
    "gemma3": Gemma3TextConfig(
        **FOUR, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "mamba": MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=3),
    "qwen3_moe": Qwen3MoeConfig(
        **FOUR, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, mlp_only_layers=[1]
    ),
}


def description(graph: ir.Graph) -> list[str]:
    """The graph without its names: the nodes behind the outputs, each with its operator, inputs, type and shape."""
    lines: list[str] = []
    known: dict[ir.Value | None, str] = {None: "none"} | {value: str(value.name) for value in graph.inputs}

    def refer(value: ir.Value) -> str:
        node = value.producer()
        if value not in known and node is None:
            tensor = value.const_value
            assert tensor is not None
            known[value] = f"{tensor.dtype}{tensor.shape}{hashlib.sha256(tensor.tobytes()).hexdigest()}"
        elif value not in known:
            assert node is not None
            inputs = [known[None] if source is None else refer(source) for source in node.inputs]
            attributes = sorted(map(str, node.attributes.values()))
            for output in node.outputs:
                known[output] = f"{len(lines)}.{output.index()}"
            types = [(str(output.type), str(output.shape)) for output in node.outputs]
            lines.append(f"{node.domain}.{node.op_type}({inputs}, {attributes}) -> {types}")
        return known[value]

    return [*map(refer, graph.outputs), *lines]


def traced_layer_by_layer(model: Any, monkeypatch: pytest.MonkeyPatch) -> ir.Graph:
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedLayers, "__bool__", lambda _: False)
        return trace(model).model.graph


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of Llama models whose forward was called."""
    numbers: list[int] = []
    forward = modeling_llama.LlamaDecoderLayer.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        numbers.append(int(self.self_attn.layer_idx))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", counted)
    return numbers


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_copied_layers_equal_traced_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(MODELS[name])
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.001 * number)  # no two norms have equal weights
    found = trace(model).model.graph
    assert description(found) == description(traced_layer_by_layer(model, monkeypatch))
    names = [value.name for node in found for value in node.outputs] + [node.name for node in found]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_a_kind_of_layers_is_traced_once(calls: list[int]) -> None:
    config = LlamaConfig(**{**ONE_LAYER, "num_hidden_layers": 4})
    graph = trace(make_model(config)).model.graph
    assert calls == [0]
    assert [node.attributes["layer"].as_int() for node in graph if node.domain == "topw.trace"] == [0, 1, 2, 3]


@pytest.mark.long
def test_layers_that_compute_with_their_number_are_all_traced(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = modeling_llama.LlamaAttention.forward

    def numbered(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = attend(self, *args, **kwargs)
        return output * (self.layer_idx + 1), weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", numbered)
    trace(make_model(LlamaConfig(**{**ONE_LAYER, "num_hidden_layers": 2})))
    assert calls == [0, 0, 1]


def add_buffer(model: Any) -> None:
    model.model.layers[1].register_buffer("added", torch.ones(1))


def set_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def share_weight(model: Any) -> None:
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def widen(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 64, bias=False)


def replace_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [add_buffer, set_epsilon, share_weight, widen, replace_activation, hook])
def test_layers_that_differ_in_more_than_values_of_weights_are_no_copies(change: Callable[[Any], None]) -> None:
    model = make_model(LlamaConfig(**{**ONE_LAYER, "num_hidden_layers": 2}))
    assert RepeatedLayers(model)
    change(model)
    assert not RepeatedLayers(model)
