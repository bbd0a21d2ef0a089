"""Placeholders for mixtures of experts in a trace.

Experts(hidden [tokens, D], ids [tokens, k], weights [tokens, k], gate_up [E, N, D], down [E, D, I],
        gate_up_bias [E, N] or none, down_bias [E, D] or none) -> [tokens, D]
    attributes activation, and for "swiglu" alpha, beta, limit and interleaved (see `Gate`).
    Each token's weighted sum over its experts. N is 2 I for "swiglu", else I.

ExpertProduct(rows [R, K], ids [R], weight [E, N, K], bias [E, N] or none) -> [R, N]
    Each row times its expert's matrix. Experts with any other activation, or with a norm, become two such products,
    with the model's own operators between them.

ids are int64. Experts that use transformers' experts interface are marked by an implementation registered there, and
other classes by one of `_ADAPTERS`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from topw_deploy.export.source.text_decoder import replaced
from topw_deploy.export.trace.placeholders import leave_placeholder

EXPERTS_OP = "Experts"
PRODUCT_OP = "ExpertProduct"
GATED = "swiglu"
_IMPLEMENTATION = "topw_placeholder"
_ACTIVATION = "_topw_activation"  # attribute of a module: its activation, [n, N] -> [n, I], and `activation_attributes`
# Inputs on which activations are compared: numbers from -24 to 24 in mixed order.
_SAMPLE = torch.linspace(-24.0, 24.0, 768)[torch.arange(768) * 325 % 768].reshape(4, 192)
_PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),  # as onnxruntime's MoE computes it
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Gate:
    """The activation g * sigmoid(alpha * g) * (u + beta), with g = min(gate, limit) and u = clip(up, -limit, limit).

    limit: infinity for no limit.
    interleaved: the rows of gate_up are [gate 0, up 0, gate 1, ...] instead of [gates; ups].
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    interleaved: bool = False

    def __call__(self, gate_up: Tensor) -> Tensor:
        if self.interleaved:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)


@dataclass(frozen=True)
class Adapter:
    """How a class of experts outside transformers' interface leaves placeholders.

    methods: name of a method -> its replacement.
    activation: path of the module's attribute that is the gate's activation; None if no placeholder needs it.
    """

    methods: dict[str, Callable[..., Any]]
    activation: str | None = None


def marked_experts(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Make the experts of `model` leave placeholders inside the block."""
    ExpertsInterface.register(_IMPLEMENTATION, _mark_call)
    changes = [(module, *change) for module in model.modules() for change in _traced_attributes(module).items()]
    # A decoder taken out of another model keeps its own configuration, which set_experts_implementation would miss.
    configs = {id(module.config): module.config for module in model.modules() if _uses_interface(module)}
    changes += [(config, "_experts_implementation_internal", _IMPLEMENTATION) for config in configs.values()]
    return replaced(*changes)


def _uses_interface(module: torch.nn.Module) -> bool:
    return hasattr(module, "_is_expert_parallel")


def _traced_attributes(module: Any) -> dict[str, Any]:
    """The attributes that `module` gets during the trace.

    Activations are compared here, before the trace, because a trace has no values to compare.
    """
    if _uses_interface(module):
        activate = module._apply_gate if module.has_gate else module.act_fn
        return {_ACTIVATION: (activate, activation_attributes(activate, gated=module.has_gate))}
    adapter = _ADAPTERS.get(type(module).__name__)
    if adapter is None:
        return {}
    names: dict[str, Any] = {name: MethodType(method, module) for name, method in adapter.methods.items()}
    if adapter.activation is not None:
        activate = _gated(attrgetter(adapter.activation)(module))
        names[_ACTIVATION] = (activate, activation_attributes(activate, gated=True))
    return names


def expert_matrices(module: Any) -> tuple[Tensor, ...]:
    """The matrices of a mixture of experts, as views [E, N, K] of its parameters; () for other modules."""
    name = type(module).__name__
    if _uses_interface(module):
        matrices = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
        return tuple(matrix.transpose(1, 2) for matrix in matrices) if module.is_transposed else matrices
    return _MATRICES[name](module) if name in _MATRICES else ()


def _mark_call(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The implementation registered in transformers' experts interface; arguments and result as of `mark_experts`."""
    name = "gate_up_proj_bias" if module.has_gate else "up_proj_bias"
    biases = (getattr(module, name), module.down_proj_bias) if module.has_bias else (None, None)
    norm = module.post_expert_norm if module.has_post_expert_norm else None
    return mark_experts(module, hidden, ids, weights, biases=biases, norm=norm)


def mark_experts(
    module: Any,
    hidden: Tensor,  # [tokens, D]
    ids: Tensor,  # [tokens, k]
    weights: Tensor,  # [tokens, k]
    *,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Leave placeholders of each token's weighted sum over its experts. Returns [tokens, D].

    module: has `_traced_attributes`; its `expert_matrices` are up (and gate) [E, N, D] and down [E, D, I].
    biases: of the two matrices, [E, N] and [E, D], each or None.
    norm: applied to each expert's output; None for no norm.
    """
    *up, down = expert_matrices(module)
    matrices = torch.cat(up, dim=1) if len(up) > 1 else up[0], down
    activate, attributes = getattr(module, _ACTIVATION)
    if attributes is not None and norm is None:
        inputs = [hidden, ids.long(), weights.to(hidden.dtype), *matrices, *biases]
        return leave_placeholder(EXPERTS_OP, inputs, attributes, hidden.dtype, hidden.shape)
    tokens, count = ids.shape
    rows, chosen = _repeat_rows(hidden, count), ids.reshape(-1)  # [tokens * k]
    rows = mark_product(activate(mark_product(rows, chosen, matrices[0], biases[0])), chosen, matrices[1], biases[1])
    rows = rows if norm is None else norm(rows)
    return (rows.reshape(tokens, count, -1) * weights[..., None]).sum(dim=1).to(hidden.dtype)


def mark_product(rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Leave a placeholder of the product of each row with its expert's matrix. Returns [R, N].

    rows: [R, K].
    ids: each row's expert, [R].
    weight: [E, N, K].
    bias: [E, N] or None.
    """
    shape = (rows.shape[0], weight.shape[1])
    return leave_placeholder(PRODUCT_OP, [rows, ids.long(), weight, bias], {}, rows.dtype, shape)


def _repeat_rows(rows: Tensor, count: int) -> Tensor:
    """Repeat each row [R, K] `count` times, [R * count, K]."""
    return rows[:, None].expand(-1, count, -1).reshape(-1, rows.shape[-1])


def activation_attributes(activate: Callable[[Tensor], Tensor], *, gated: bool) -> dict[str, Any] | None:
    """The attributes of an Experts placeholder with the activation `activate`; None if no attributes describe it.

    Compares its outputs with those of known activations.
    gated: whether `activate` maps [n, 2 I] to [n, I].
    """
    wanted = activate(_SAMPLE)
    if not gated:
        names = [name for name, plain in _PLAIN_ACTIVATIONS.items() if _are_equal(plain(_SAMPLE), wanted)]
        return {"activation": names[0]} if names else None
    gates = [
        gate for gate in _candidate_gates(getattr(activate, "__self__", None)) if _are_equal(gate(_SAMPLE), wanted)
    ]
    if not gates:
        return None
    limit = gates[0].limit if math.isfinite(gates[0].limit) else 0.0
    return {"activation": GATED, **asdict(gates[0]), "limit": limit, "interleaved": int(gates[0].interleaved)}


def _are_equal(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def _candidate_gates(module: Any) -> Iterator[Gate]:
    """The gates to compare an activation with, which have the constants in attributes of its `module`."""
    limits = [getattr(module, name, None) for name in ("limit", "swiglu_limit")]
    alphas = [getattr(module, name, None) for name in ("alpha", "swiglu_alpha")]
    limit = next((float(found) for found in limits if isinstance(found, int | float)), math.inf)
    alpha = next((float(found) for found in alphas if isinstance(found, int | float)), 1.0)
    for interleaved in (False, True):
        yield Gate(interleaved=interleaved)
        for beta in (0.0, 1.0):
            yield Gate(alpha, beta, limit, interleaved)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function activation(gate) * up of [gate, up] on the last axis."""

    def activate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return activate


def _dbrx_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """DbrxExperts.forward. The matrices of all experts are stacked in two dimensions."""
    rows = hidden_states.reshape(-1, self.hidden_size)
    return mark_experts(self, rows, top_k_index, top_k_weights).view(hidden_states.shape)


def _llama4_experts(self: Any, hidden_states: Tensor) -> Any:
    """Llama4TextMoe.forward. Scores multiply the experts' inputs, so the outputs have weights of 1."""
    rows = hidden_states.reshape(-1, self.hidden_dim)
    logits = functional.linear(rows, self.router.weight, self.router.bias)
    values, ids = torch.topk(logits, self.top_k, dim=1)  # [tokens, k]
    scaled = rows[:, None] * torch.sigmoid(values.float()).to(rows.dtype)[..., None]  # [tokens, k, D]
    one = torch.ones_like(values).reshape(-1, 1)
    mixed = mark_experts(self, scaled.reshape(-1, self.hidden_dim), ids.reshape(-1, 1), one)
    return self.shared_expert(rows) + mixed.reshape(scaled.shape).sum(dim=1), logits


def _longcat_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    """LongcatFlashExperts.forward. Experts beyond the routed ones return their input."""
    weights = top_k_weights.to(hidden_states.dtype)
    returns_input = top_k_index >= self.num_routed_experts
    unchanged = (weights * returns_input).sum(dim=-1, keepdim=True) * hidden_states
    ids, weights = top_k_index.masked_fill(returns_input, 0), weights.masked_fill(returns_input, 0.0)
    return unchanged + mark_experts(self, hidden_states, ids, weights)


def _jetmoe_experts(self: Any, layer_input: Tensor) -> Any:
    """JetMoeMoE.forward. The layer adds a bias to its experts' sum."""
    rows = layer_input.reshape(-1, self.input_size)
    weights, ids = _jetmoe_route(self.router, rows)
    return mark_experts(self, rows, ids, weights).view(layer_input.shape) + self.bias


def _jetmoe_queries(self: Any, layer_input: Tensor) -> Any:
    """JetMoeMoA.map: the queries of each token's experts, [batch, sequence, k, heads * dim]."""
    batch, length, width = layer_input.shape
    rows = layer_input.reshape(-1, width)
    weights, ids = _jetmoe_route(self.router, rows)
    queries = mark_product(_repeat_rows(rows, self.top_k), ids.reshape(-1), self.input_linear.weight)
    return queries.view(batch, length, self.top_k, -1), None, (weights, ids)


def _jetmoe_outputs(self: Any, layer_input: Tensor, topo_info: tuple[Tensor, Tensor]) -> Any:
    """JetMoeMoA.reduce: the weighted sum of the experts' output projections, [batch, sequence, hidden]."""
    batch, length, count, width = layer_input.shape
    weights, ids = topo_info
    rows = mark_product(layer_input.reshape(-1, width), ids.reshape(-1), self.output_linear.weight)
    weighted = rows.view(-1, count, self.input_size) * weights[..., None]
    return weighted.sum(dim=1).view(batch, length, self.input_size) + self.bias


def _jetmoe_route(router: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and the ids [tokens, k] of each token's experts."""
    values, ids = router.layer(rows).float().topk(router.top_k, dim=1)
    return torch.softmax(values, dim=1).type_as(rows), ids


_ADAPTERS = {
    "DbrxExperts": Adapter({"forward": _dbrx_experts}, "mlp.activation_fn"),
    "JetMoeMoA": Adapter({"map": _jetmoe_queries, "reduce": _jetmoe_outputs}),
    "JetMoeMoE": Adapter({"forward": _jetmoe_experts}, "activation"),
    "Llama4TextMoe": Adapter({"forward": _llama4_experts}, "experts.act_fn"),
    "LongcatFlashExperts": Adapter({"forward": _longcat_experts}, "act_fn"),
}


def _dbrx_matrices(module: Any) -> tuple[Tensor, ...]:
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    gate, up, down = (getattr(module.mlp, name).view(shape) for name in ("w1", "v1", "w2"))
    return gate, up, down.transpose(1, 2)


_MATRICES: dict[str, Callable[[Any], tuple[Tensor, ...]]] = {
    "DbrxExperts": _dbrx_matrices,
    "JetMoeMoA": lambda module: (module.input_linear.weight, module.output_linear.weight),
    "JetMoeMoE": lambda module: (module.input_linear.weight, module.output_linear.weight),
    "Llama4TextMoe": lambda module: (
        module.experts.gate_up_proj.transpose(1, 2),
        module.experts.down_proj.transpose(1, 2),
    ),
    "LongcatFlashExperts": lambda module: (module.gate_up_proj[: module.num_routed_experts], module.down_proj),
}
"""Class name of experts outside transformers' interface -> function that returns the `expert_matrices` of a module."""
