"""Greedy tokens by ORTModelForCausalLM.generate, in optimum's environment.

Argument and answer as in run_genai.py.
"""

from __future__ import annotations

import json
import sys

import torch
from optimum.onnxruntime import ORTModelForCausalLM


def generate(folder: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    model = ORTModelForCausalLM.from_pretrained(folder, use_cache=True, use_io_binding=False)
    ids = torch.tensor(prompts)
    rows = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens)
    return rows[:, ids.shape[1] :].tolist()


if __name__ == "__main__":
    sys.stdout.write(json.dumps([generate(**task) for task in json.loads(sys.argv[1])]))
