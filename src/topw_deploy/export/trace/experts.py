"""Markers for mixtures of experts in a trace.

- `Experts(hidden [tokens, D], ids [tokens, k], weights [tokens, k], gate_up [E, N, D], down [E, D, I], gate_up_bias?
  [E, N], down_bias? [E, D])` -> [tokens, D]: each token's weighted sum over its experts. Attributes: activation. For
  `swiglu`, N is 2 I, with the attributes alpha, beta, limit and interleaved of `Gate`; otherwise N is I.
- `ExpertProduct(rows [R, K], ids [R], weight [E, N, K], bias? [E, N])` -> [R, N]: each row times one expert's matrix.
  Experts with any other activation, or with a norm, become two such products, with the model's own operators between.

ids are int64. Experts that use transformers' experts interface are marked by an implementation registered there, other
classes by one of `_ADAPTERS`.
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
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

EXPERTS_OP = "Experts"
PRODUCT_OP = "ExpertProduct"
GATED = "swiglu"
_DOMAIN = "topw.trace"
_IMPLEMENTATION = "topw_marker"
_STATED = "_topw_stated"  # module attribute: the result of `stated` for its activation
_PROBE = torch.linspace(-24.0, 24.0, 768)[torch.arange(768) * 325 % 768].reshape(4, 192)  # to compare activations on
_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),  # as onnxruntime's MoE computes it
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Gate:
    """g * sigmoid(alpha * g) * (u + beta), of g = min(gate, limit) and u = up within +-limit.

    limit: infinity for none.
    interleaved: rows are [gate 0, up 0, gate 1, ...] instead of [gates; ups].
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    interleaved: bool = False

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.interleaved:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)


@dataclass(frozen=True)
class Adapter:
    """How experts outside transformers' interface are marked.

    methods: name -> replacement of the module's method.
    activation: path of the attribute that holds the gate's activation.
    """

    methods: dict[str, Callable[..., Any]]
    activation: str | None = None


@contextlib.contextmanager
def marked_experts(model: PreTrainedModel) -> Iterator[None]:
    """Trace the experts of `model` as markers inside the block."""
    ExpertsInterface.register(_IMPLEMENTATION, _experts)
    replaced = [(module, _in_trace(module)) for module in model.modules()]
    # A decoder taken out of another model keeps its own configuration, which the model's method would pass over.
    configs = {id(module.config): module.config for module, _ in replaced if _is_of_interface(module)}
    before = [(config, config._experts_implementation_internal) for config in configs.values()]
    for config, _ in before:
        config._experts_implementation_internal = _IMPLEMENTATION
    for module, names in replaced:
        vars(module).update(names)
    try:
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation_internal = implementation
        for module, names in replaced:
            for name in names:
                del vars(module)[name]


def _is_of_interface(module: torch.nn.Module) -> bool:
    return hasattr(module, "_is_expert_parallel")


def _in_trace(module: Any) -> dict[str, Any]:
    """Instance attributes to set on `module` during the trace.

    Activations are compared here, because a trace has no values to compare.
    """
    if _is_of_interface(module):
        activate = module._apply_gate if module.has_gate else module.act_fn
        return {_STATED: stated(activate, gated=module.has_gate)}
    adapter = _ADAPTERS.get(type(module).__name__)
    if adapter is None:
        return {}
    names: dict[str, Any] = {name: MethodType(method, module) for name, method in adapter.methods.items()}
    if adapter.activation is not None:
        names[_STATED] = stated(_gate_of(attrgetter(adapter.activation)(module)), gated=True)
    return names


def expert_matrices(module: Any) -> tuple[torch.Tensor, ...]:
    """The matrices of a mixture of experts, as views [E, N, K] of its parameters; empty for other modules."""
    name = type(module).__name__
    if _is_of_interface(module):
        matrices = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
        return tuple(matrix.transpose(1, 2) for matrix in matrices) if module.is_transposed else matrices
    return _MATRICES[name](module) if name in _MATRICES else ()


def _experts(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The implementation for transformers' experts interface; arguments as for `mix`."""
    name = "gate_up_proj_bias" if module.has_gate else "up_proj_bias"
    up, down = expert_matrices(module)
    biases = (getattr(module, name), module.down_proj_bias) if module.has_bias else (None, None)
    activate = module._apply_gate if module.has_gate else module.act_fn
    norm = module.post_expert_norm if module.has_post_expert_norm else None
    return mix(hidden, ids, weights, (up, down), activate, getattr(module, _STATED), biases=biases, norm=norm)


def mix(
    hidden: torch.Tensor,  # [tokens, D]
    ids: torch.Tensor,  # [tokens, k]
    weights: torch.Tensor,  # [tokens, k]
    matrices: tuple[torch.Tensor, torch.Tensor],  # up (and gate) [E, N, D], down [E, D, I]
    activate: Callable[[torch.Tensor], torch.Tensor],
    attributes: dict[str, Any] | None,
    *,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Mark the weighted sum of each token's experts. Returns [tokens, D].

    activate: [n, N] -> [n, I].
    attributes: the result of `stated` for `activate`.
    norm: applied to each expert's output.
    """
    if attributes is not None and norm is None:
        inputs = [hidden, ids.long(), weights.to(hidden.dtype), *matrices, *biases]
        return _symbolic(EXPERTS_OP, inputs, attributes, hidden.shape)
    tokens, count = ids.shape
    rows, chosen = _repeated(hidden, count), ids.reshape(-1)  # [tokens * k]
    rows = product(activate(product(rows, chosen, matrices[0], biases[0])), chosen, matrices[1], biases[1])
    rows = rows if norm is None else norm(rows)
    weighted = rows.reshape(tokens, count, -1) * weights[..., None]
    return weighted.sum(dim=1).to(hidden.dtype)


def product(
    rows: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Mark the product of each row [R, K] with its matrix of `weight[ids]`. Returns [R, N]."""
    return _symbolic(PRODUCT_OP, [rows, ids.long(), weight, bias], {}, (rows.shape[0], weight.shape[1]))


def _repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Each row `count` times, [R * count, K]."""
    return rows[:, None].expand(-1, count, -1).reshape(-1, rows.shape[-1])


def _symbolic(op_type: str, inputs: list[torch.Tensor | None], attributes: dict[str, Any], shape: Any) -> torch.Tensor:
    while inputs[-1] is None:
        inputs.pop()
    dtype = next(tensor.dtype for tensor in inputs if tensor is not None)
    return torch.onnx.ops.symbolic(
        f"{_DOMAIN}::{op_type}", inputs, attributes, dtype=dtype, shape=tuple(shape), version=1
    )


def stated(activate: Callable[[torch.Tensor], torch.Tensor], *, gated: bool) -> dict[str, Any] | None:
    """The marker's attributes for an activation, found by comparing outputs; None if no attributes describe it."""
    wanted = activate(_PROBE)
    if not gated:
        names = [name for name, plain in _PLAIN.items() if _equal(plain(_PROBE), wanted)]
        return {"activation": names[0]} if names else None
    gates = [gate for gate in _gates_of(getattr(activate, "__self__", None)) if _equal(gate(_PROBE), wanted)]
    if not gates:
        return None
    limit = gates[0].limit if math.isfinite(gates[0].limit) else 0.0
    return {"activation": GATED, **asdict(gates[0]), "limit": limit, "interleaved": int(gates[0].interleaved)}


def _equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def _gates_of(module: Any) -> Iterator[Gate]:
    """The gates to compare with, using constants found in the module's attributes."""
    limits = [getattr(module, name, None) for name in ("limit", "swiglu_limit")]
    alphas = [getattr(module, name, None) for name in ("alpha", "swiglu_alpha")]
    limit = next((float(found) for found in limits if isinstance(found, int | float)), math.inf)
    alpha = next((float(found) for found in alphas if isinstance(found, int | float)), 1.0)
    for interleaved in (False, True):
        yield Gate(interleaved=interleaved)
        for beta in (0.0, 1.0):
            yield Gate(alpha, beta, limit, interleaved)


def _gate_of(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return activate


def _dbrx(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
    """DbrxExperts: matrices of all experts are stacked in two dimensions."""
    gate, up, down = expert_matrices(self)
    rows = hidden_states.reshape(-1, self.hidden_size)
    matrices = torch.cat([gate, up], dim=1), down
    mixed = mix(rows, top_k_index, top_k_weights, matrices, _gate_of(self.mlp.activation_fn), getattr(self, _STATED))
    return mixed.view(hidden_states.shape)


def _llama4(self: Any, hidden_states: torch.Tensor) -> Any:
    """Llama4TextMoe: scores multiply the experts' inputs, so the outputs have weights of 1."""
    rows = hidden_states.reshape(-1, self.hidden_dim)
    logits = functional.linear(rows, self.router.weight, self.router.bias)
    values, ids = torch.topk(logits, self.top_k, dim=1)  # [tokens, k]
    scaled = rows[:, None] * torch.sigmoid(values.float()).to(rows.dtype)[..., None]  # [tokens, k, D]
    up, down = expert_matrices(self)
    one = torch.ones_like(values).reshape(-1, 1)
    gate = _gate_of(self.experts.act_fn)
    scaled_rows = scaled.reshape(-1, self.hidden_dim)
    mixed = mix(scaled_rows, ids.reshape(-1, 1), one, (up, down), gate, getattr(self, _STATED))
    return self.shared_expert(rows) + mixed.reshape(scaled.shape).sum(dim=1), logits


def _longcat(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
    """LongcatFlashExperts: experts beyond the routed ones return their input."""
    weights = top_k_weights.to(hidden_states.dtype)
    same = top_k_index >= self.num_routed_experts
    kept = (weights * same).sum(dim=-1, keepdim=True) * hidden_states
    up, down = expert_matrices(self)
    ids = top_k_index.masked_fill(same, 0)
    gate = _gate_of(self.act_fn)
    mixed = mix(hidden_states, ids, weights.masked_fill(same, 0.0), (up, down), gate, getattr(self, _STATED))
    return kept + mixed


def _jetmoe(self: Any, layer_input: torch.Tensor) -> Any:
    """JetMoeMoE."""
    rows = layer_input.reshape(-1, self.input_size)
    weights, ids = _jetmoe_route(self.router, rows)
    up, down = expert_matrices(self)
    mixed = mix(rows, ids, weights, (up, down), _gate_of(self.activation), getattr(self, _STATED))
    return mixed.view(layer_input.shape) + self.bias


def _jetmoe_map(self: Any, layer_input: torch.Tensor) -> Any:
    """JetMoeMoA.map: the queries of each token's experts, [batch, sequence, k, heads * dim]."""
    batch, length, width = layer_input.shape
    rows = layer_input.reshape(-1, width)
    weights, ids = _jetmoe_route(self.router, rows)
    queries = product(_repeated(rows, self.top_k), ids.reshape(-1), self.input_linear.weight)
    return queries.view(batch, length, self.top_k, -1), None, (weights, ids)


def _jetmoe_reduce(self: Any, layer_input: torch.Tensor, topo_info: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """JetMoeMoA.reduce: the weighted sum of the experts' output projections."""
    batch, length, count, width = layer_input.shape
    weights, ids = topo_info
    rows = product(layer_input.reshape(-1, width), ids.reshape(-1), self.output_linear.weight)
    weighted = rows.view(-1, count, self.input_size) * weights[..., None]
    return weighted.sum(dim=1).view(batch, length, self.input_size) + self.bias


def _jetmoe_route(router: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids [tokens, k]."""
    values, ids = router.layer(rows).float().topk(router.top_k, dim=1)
    return torch.softmax(values, dim=1).type_as(rows), ids


_ADAPTERS = {
    "DbrxExperts": Adapter({"forward": _dbrx}, "mlp.activation_fn"),
    "JetMoeMoA": Adapter({"map": _jetmoe_map, "reduce": _jetmoe_reduce}),
    "JetMoeMoE": Adapter({"forward": _jetmoe}, "activation"),
    "Llama4TextMoe": Adapter({"forward": _llama4}, "experts.act_fn"),
    "LongcatFlashExperts": Adapter({"forward": _longcat}, "act_fn"),
}


def _dbrx_matrices(module: Any) -> tuple[torch.Tensor, ...]:
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    gate, up, down = (getattr(module.mlp, name).view(shape) for name in ("w1", "v1", "w2"))
    return gate, up, down.transpose(1, 2)


_MATRICES: dict[str, Callable[[Any], tuple[torch.Tensor, ...]]] = {
    "DbrxExperts": _dbrx_matrices,
    "JetMoeMoA": lambda module: (module.input_linear.weight, module.output_linear.weight),
    "JetMoeMoE": lambda module: (module.input_linear.weight, module.output_linear.weight),
    "Llama4TextMoe": lambda module: (
        module.experts.gate_up_proj.transpose(1, 2),
        module.experts.down_proj.transpose(1, 2),
    ),
    "LongcatFlashExperts": lambda module: (module.gate_up_proj[: module.num_routed_experts], module.down_proj),
}
"""Class name of experts outside transformers' interface -> function that returns its `expert_matrices`."""
