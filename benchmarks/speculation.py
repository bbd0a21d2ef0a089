"""Time and texts of `speculate="prompt"` beside those without. Results: docs/lab/results.md.

python -m benchmarks.speculation OUT [--seeds 8] [--tokens 100] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from topw_deploy import TopWModel
from topw_deploy.runtime import GenerationResult
from topw_lab.tables import table

CODE = '''def area(width, height):
    """Return the area of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return width * height

def perimeter(width, height):
    """Return the perimeter of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return 2 * (width + height)
'''
STORY = (
    "The old lighthouse keeper, Mr. Abernathy, had lived alone on the island for thirty years. Every evening he "
    "climbed the ninety-nine steps to light the lamp. One night a ship named the Silver Heron ran aground on the reef."
)
PROMPTS = {
    "edited code": f"Repeat this code exactly, but rename the argument `height` to `depth`:\n\n{CODE}",
    "quotation": f"Quote the following text word for word, then summarize it:\n\n{STORY}",
    "story": "Write a short story about a dragon who learns to bake bread.",
    "explanation": "Explain how rainbows form, in your own words.",
}
RULES = (
    {"temperature": 0.7},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 1.5},
    {"temperature": 1.0, "min_p": 0.1},
)
"""The parameters of a seed, in turn."""
MODES: tuple[dict[str, Any], ...] = ({}, {"speculate": "prompt"})


def seconds_per_token(result: GenerationResult) -> float:
    """Decode time per token, however many runs there were."""
    return result.timings.decode_seconds / max(1, len(result.token_ids) - 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    model = TopWModel.from_pretrained(options.folder, intra_op_num_threads=options.threads)
    rows = []
    for name, text in PROMPTS.items():
        prompt = model.apply_chat_template([{"role": "user", "content": text}])
        ratios, same, drawn, drafted, accepted = [], 0, 0, 0, 0
        for seed in range(-2, options.seeds):  # the first two warm up, and measure runs of each width
            given: dict[str, Any] = {**RULES[seed % 4], "max_new_tokens": options.tokens, "seed": abs(seed)}
            results = {}
            for more in MODES[:: 1 if seed // 4 % 2 else -1]:
                results[len(more)] = model.generate(prompt, add_special_tokens=False, **given, **more)
            if seed < 0:
                continue
            plain, found = results[0], results[1]
            ratios.append(seconds_per_token(plain) / seconds_per_token(found))
            same += plain.token_ids == found.token_ids
            drawn += len(found.token_ids)
            drafted, accepted = drafted + found.drafted_tokens, accepted + found.accepted_tokens
        low, median, high = statistics.quantiles(ratios, n=4)
        rows.append([name, f"{median:.2f} ({low:.2f} to {high:.2f})", f"{accepted} of {drafted}",
                     f"{same} of {options.seeds}", str(drawn)])  # fmt: skip
    print(table(["text", "tokens per second, to without", "accepted", "same texts", "tokens"], rows))


if __name__ == "__main__":
    main()
