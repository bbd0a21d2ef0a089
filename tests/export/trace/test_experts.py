"""Mixtures of experts of every family leave placeholders, whose lowerings agree with torch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import onnxscript.optimizer
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN

from tests.support.samples import sampled
from topw_deploy.export.lowering.experts import lower_experts
from topw_deploy.export.trace.experts import activation_attributes, marked_experts
from topw_deploy.export.trace.trace import silenced_libraries

FLOAT32 = 1e-5  # of the largest output; measured: 3e-7
HALF = 5e-3  # of the largest output: float16 has 11 bits; measured: 1e-3
HIDDEN = 32
SIZES = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ROUTED = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
GROUPS = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SCALED = {**ROUTED, **GROUPS, "n_routed_experts": 8, "routed_scaling_factor": 2.5}
FULL = {"layer_types": ["full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mlp", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "qwen2_moe": ("mlp", {**ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("mlp", {**ROUTED, "num_experts": 8}),
    "qwen3_next": ("mlp", {**ROUTED, **FULL, "num_experts": 8, "shared_expert_intermediate_size": 24}),
    "olmoe": ("mlp", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granitemoe": ("block_sparse_moe", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "phimoe": ("mlp", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "ernie4_5_moe": (
        "mlp",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
    ),
    "deepseek_v2": ("mlp", {**SCALED, **LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("mlp", {**SCALED, **LATENT}),
    "glm4_moe": ("mlp", SCALED),
    "dots1": ("mlp", SCALED),
    "hunyuan_v1_moe": ("mlp", {"num_experts": 8, "moe_topk": 3, "head_dim": 8}),
    "lfm2_moe": ("feed_forward", {**ROUTED, **FULL, "num_experts": 8, "num_dense_layers": 0}),
    "jamba": (
        "feed_forward",
        {"num_experts": 8, "num_experts_per_tok": 3, "expert_layer_period": 1, "expert_layer_offset": 0}
        | {"attn_layer_period": 1, "attn_layer_offset": 0},
    ),
    "minimax": ("mlp", {**FULL, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "afmoe": ("mlp", {**ROUTED, **FULL, "num_experts": 8, "num_dense_layers": 0, "num_shared_experts": 1}),
    "gpt_oss": ("mlp", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8}),
    "nemotron_h": (
        "mixer",
        {**ROUTED, "n_routed_experts": 8, "moe_shared_expert_intermediate_size": 24, "layers_block_type": ["moe"]}
        | {"n_group": 1, "topk_group": 1, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
    ),
    "llama4_text": (
        "feed_forward",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 48}
        | {"head_dim": 8},
    ),
    "jetmoe": ("mlp", {"num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 8}),
    "longcat_flash": (
        "mlp",
        {**LATENT, "n_routed_experts": 8, "moe_topk": 3, "zero_expert_num": 2, "expert_ffn_hidden_size": 24}
        | {"ffn_hidden_size": 48, "num_layers": 1},
    ),
    "dbrx": (
        "ffn",
        {"d_model": HIDDEN, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "vocab_size": 64}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 3, "hidden_size": HIDDEN}},
    ),
    "zaya": ("mlp", {"num_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 1}),
}
OWN_SIZES = {"dbrx"}
COUNTED_OTHERWISE = {"nemotron_h", "longcat_flash"}  # their configurations derive the number of layers
PRODUCTS = {"nemotron_h"}  # squared ReLU, which MoE lacks


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {} if family in OWN_SIZES else dict(SIZES)
    if family in COUNTED_OTHERWISE:
        del sizes["num_hidden_layers"]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes, **FAMILIES[family][1])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.dim() > 1
            ):  # also routers that start as zeros, whose ties torch and onnxruntime break differently
                parameter.normal_(std=0.1)
    return model


def block_of(model: PreTrainedModel, name: str) -> torch.nn.Module:
    """The first layer's mixture, with its router."""
    found = [module for path, module in model.named_modules() if path.split(".")[-2:] == ["0", name]]
    return found[0]


def traced(model: PreTrainedModel, block: torch.nn.Module, hidden: torch.Tensor) -> ir.Model:
    auto = torch.export.Dim.AUTO
    with marked_experts(model), torch.no_grad(), silenced_libraries():
        program = torch.onnx.export(
            block, (hidden,), dynamo=True, opset_version=23, optimize=False, dynamic_shapes=({0: auto, 1: auto},)
        )
        assert program is not None
        onnxscript.optimizer.optimize_ir(program.model)
    return program.model


def output_of(model: ir.Model, hidden: torch.Tensor, *, operator: bool) -> tuple[np.ndarray, list[str]]:
    copy = model.clone()
    lower_experts(copy, operator=operator)
    copy.opset_imports.pop("topw.trace", None)
    session = ort.InferenceSession(ir.to_proto(copy).SerializeToString(), providers=["CPUExecutionProvider"])
    (name,) = (value.name for value in session.get_inputs())
    found = session.run(None, {name: hidden.numpy()})[0]
    return found.reshape(-1, HIDDEN), [node.op_type for node in copy.graph if node.domain]


def literal(block: torch.nn.Module, hidden: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        out = block(hidden)
    return (out[0] if isinstance(out, tuple) else out).reshape(-1, HIDDEN).float().numpy()


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    sampled(FAMILIES, (), ("mixtral", "granitemoe", "phimoe", "gpt_oss", "nemotron_h", "llama4_text", "dbrx", "zaya")),
)
def test_a_familys_mixture_agrees_with_torch_in_prompts_and_steps(family: str) -> None:
    model = model_of(family)
    block, hidden = block_of(model, FAMILIES[family][0]), torch.randn(2, 7, HIDDEN)
    graph = traced(model, block, hidden)
    placeholders = [node.op_type for node in graph.graph if node.domain == "topw.trace"]
    assert placeholders == (["ExpertProduct"] * 2 if family in PRODUCTS else ["Experts"])
    for rows in (hidden, hidden[:1, :1], hidden[:, :1]):
        wanted = literal(block, rows)
        for operator in (True, False):
            found, domains = output_of(graph, rows, operator=operator)
            assert domains == (["MoE"] if operator and family not in PRODUCTS else [])
            np.testing.assert_allclose(found, wanted, atol=FLOAT32 * max(1.0, np.abs(wanted).max()))


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h"])
def test_a_mixture_of_half_precision_is_near_torch(family: str) -> None:
    model = model_of(family).half()
    block, hidden = block_of(model, FAMILIES[family][0]), torch.randn(1, 5, HIDDEN).half()
    wanted = literal(block, hidden)
    found, domains = output_of(traced(model, block, hidden), hidden, operator=True)
    assert domains == []
    np.testing.assert_allclose(found.astype(np.float32), wanted, atol=HALF * max(1.0, np.abs(wanted).max()))


class Attention(torch.nn.Module):
    """JetMoe's queries and output projection, without the attention between them."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        queries, _, routes = self.experts.map(hidden)  # type: ignore[operator]
        return self.experts.reduce(torch.tanh(queries), routes)  # type: ignore[operator, no-any-return]


@pytest.mark.slow
def test_experts_of_attention_agree_with_torch() -> None:
    model = model_of("jetmoe")
    block, hidden = Attention(model.model.layers[0].self_attention.experts), torch.randn(2, 5, HIDDEN)
    found, _ = output_of(traced(model, block, hidden), hidden, operator=True)
    np.testing.assert_allclose(found, literal(block, hidden), atol=FLOAT32)


def test_experts_with_a_configuration_of_their_own_are_marked_too() -> None:
    """Such as those of a text decoder that was taken out of a model that also reads images."""
    model = model_of("gpt_oss")
    experts = model.model.layers[0].mlp.experts
    model.config = copy.deepcopy(model.config)
    before = experts.config._experts_implementation
    with marked_experts(model):
        assert experts.config._experts_implementation == "topw_placeholder"
    assert experts.config._experts_implementation == before


def test_an_activation_gets_attributes_only_if_its_values_agree() -> None:
    known = {"relu": "relu", "silu": "silu", "gelu_pytorch_tanh": "gelu"}
    for name, wanted in known.items():
        found = activation_attributes(ACT2FN[name], gated=False)
        assert found is not None
        assert found["activation"] == wanted
    assert activation_attributes(ACT2FN["gelu"], gated=False) is None  # the error function, not tanh
    assert activation_attributes(ACT2FN["relu2"], gated=False) is None
    assert activation_attributes(lambda x: torch.tanh(x[..., ::2]) * x[..., 1::2], gated=True) is None
