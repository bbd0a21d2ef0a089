"""Runs in onnxruntime-genai's environment: greedy tokens after the prompts, by its own loop.

Argument and answer are JSON: [{"folder", "prompts" (of equal length), "new_tokens"}, ...] -> per task its rows' tokens.
"""

from __future__ import annotations

import json
import sys

import onnxruntime_genai as og


def generate(folder: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    config = og.Config(folder)
    config.clear_providers()  # the CPU's stays; a folder made for CUDA is run here all the same
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
