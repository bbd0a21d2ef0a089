"""Fixtures: a tiny model and its embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.sampling.tiny import tiny_llama


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower with more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def table(model: LlamaForCausalLM) -> torch.Tensor:
    """The model's embeddings [vocabulary, width]."""
    return model.get_input_embeddings().weight
