"""Rotary sections of time, height and width are traced with the equal positions of text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig

from tests.support.lowerings import attention_nodes, copy_of
from tests.support.tiny_models import ONE_LAYER, make_model
from topw_deploy.export.trace.trace import plain_rotary_embeddings, positions_of_text, trace
from topw_deploy.export.traced_decoder import lower

pytestmark = pytest.mark.slow
POSITIONS = torch.tensor([[3, 4, 5], [0, 1, 9]])


class Sections(torch.nn.Module):
    """Rotary angles of three axes; `factor` scales those of the second."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.mrope_section, self.attention_scaling, self.factor = [2, 1, 1], 1.5, factor
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.5, 0.25, 0.125]))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Any:
        angles = positions[..., None].float() * self.inv_freq  # [3, batch, sequence, 4]
        chosen = torch.cat([angles[0, ..., :2], self.factor * angles[1, ..., 2:3], angles[2, ..., 3:]], -1)
        both = torch.cat([chosen, chosen], -1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling


def test_rotary_factors_are_those_of_text_positions_inside_the_block_only() -> None:
    module, x = Sections(1.0), torch.zeros(1)
    wanted = module(x, POSITIONS.expand(3, 2, 3))
    other = module(x, torch.zeros(3, 2, 3))
    embeddings = plain_rotary_embeddings(module)
    assert embeddings == [module]
    with positions_of_text(embeddings, POSITIONS):
        found = module(x, torch.zeros(3, 2, 3))
    assert all(torch.equal(one, two) for one, two in zip(wanted, found, strict=True))
    assert torch.equal(module(x, torch.zeros(3, 2, 3))[0], other[0])


def test_a_rotary_embedding_that_computes_something_else_is_left_unchanged() -> None:
    assert plain_rotary_embeddings(Sections(2.0)) == []


def test_attention_of_qwen_3_5_rotates_inside_the_operator() -> None:
    sections = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}
    config = Qwen3_5TextConfig(**ONE_LAYER, head_dim=16, layer_types=["full_attention"], rope_parameters=sections)
    decoder = copy_of(trace(make_model(config)))
    lower(decoder, kv=None, target="onnxruntime", context_length=64)
    assert all(node.attributes["do_rotary"].as_int() == 1 for node in attention_nodes(decoder))
