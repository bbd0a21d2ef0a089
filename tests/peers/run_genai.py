"""Greedy tokens by onnxruntime-genai's loop, in its environment.

JSON in and out: [{"folder", "prompts" (of equal length), "new_tokens"}, ...] -> per task its rows' tokens.
"""

from __future__ import annotations

import json
import sys

import onnxruntime_genai as og


def generate(folder: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    config = og.Config(folder)
    config.clear_providers()  # leaves the CPU's
    model = og.Model(config)
    parameters = og.GeneratorParams(model)
    length = len(prompts[0])
    parameters.set_search_options(do_sample=False, max_length=length + new_tokens, batch_size=len(prompts))
    generator = og.Generator(model, parameters)
    generator.append_tokens(prompts if len(prompts) > 1 else prompts[0])
    while not generator.is_done():
        generator.generate_next_token()
    return [[int(token) for token in generator.get_sequence(row)[length:]] for row in range(len(prompts))]


if __name__ == "__main__":
    sys.stdout.write(json.dumps([generate(**task) for task in json.loads(sys.argv[1])]))
