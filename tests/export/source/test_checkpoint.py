"""Context lengths from configurations."""

from __future__ import annotations

import pytest
from transformers import BloomConfig, GPT2Config, LlamaConfig, MptConfig, Phi3Config, PreTrainedConfig

from topw_deploy.export.source.text_decoder import context_length, switching_rope

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (GPT2Config(n_positions=77), 77),
        (LlamaConfig(max_position_embeddings=300), 300),
        (MptConfig(max_seq_len=77), 77),
        (BloomConfig(seq_length=77), 77),
        (BloomConfig(), 65_536),  # ALiBi has no limit
        (LlamaConfig(max_position_embeddings=300, rope_parameters=LLAMA3), 300),
        (
            Phi3Config(
                hidden_size=32,
                num_attention_heads=4,
                max_position_embeddings=300,
                original_max_position_embeddings=64,
                rope_parameters=LONG,
            ),
            64,  # beyond it the model's frequencies differ from the graph's
        ),
    ],
    ids=["gpt2", "plain", "mpt", "bloom", "bloom_unlimited", "llama3", "longrope"],
)
def test_the_context_ends_where_the_graph_differs_from_the_model(config: PreTrainedConfig, length: int) -> None:
    assert context_length(config) == length
    assert (switching_rope(config) is not None) is (length == 64)
