"""Tokens per second of the bundled model in Python, under Node and in a browser, each with one thread.

    make browser && python -m benchmarks.web [--rounds 5] [--tokens 128] [--dtypes fp32,int8,int4] [--json FILE]

Python runs the native sampler and the function in the file; Node and the browser have the function only. Every sample
is a process of its own. Steps after the first token count. A side that draws other tokens is named on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Spread, interleave, machine, say, table
from benchmarks.models import export_once
from topw_deploy.web import write_site

HERE = Path(__file__).parent
BROWSER = HERE.parents[1] / ".browser"
PROMPT = "class Path"
SETTINGS: dict[str, dict[str, Any]] = {"defaults": {}, "lively": {"preset": "lively"}}
SIDES = ("Python, native", "Python, function", "Node, function", "browser, function")
_PYTHON = """
import json, sys
from topw_deploy.runtime import TopWModel
folder, sampler, request = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1, sampler=sampler)
prompt, parameters = request["prompt"], request["parameters"]
model.generate(prompt, **{**parameters, "max_new_tokens": 4})
result = model.generate(prompt, **parameters).as_dict()
print(json.dumps({"token_ids": result["token_ids"], "timings": result["timings"]}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtypes", default="fp32,int8,int4", help="of `topw-export`, separated by commas")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    args = parser.parse_args()
    found = {dtype: _measure_dtype(dtype, args.rounds, args.tokens) for dtype in args.dtypes.split(",")}
    print(f"{machine()}; {args.rounds} rounds of {args.tokens} tokens, one thread\n")
    rows = [
        (dtype, setting, side, Spread.of(rates).format(digits=1))
        for dtype, settings in found.items()
        for setting, sides in settings.items()
        for side, rates in sides.items()
    ]
    print(table(("weights", "parameters", "side", "tokens per second (quartiles)"), rows))
    if args.json:
        document = {"machine": machine(), "tokens": args.tokens, "tokens_per_second": found}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _measure_dtype(dtype: str, rounds: int, tokens: int) -> dict[str, dict[str, list[float]]]:
    """Setting -> side -> tokens per second of each round."""
    model = export_once("tiny", "--dtype", dtype)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        write_site(model, site, runtime=BROWSER)
        for setting, parameters in SETTINGS.items():
            say(f"{dtype}, {setting}")
            given = {"seed": 2, "max_new_tokens": tokens, "ignore_eos": True, **parameters}
            found[setting] = _measure_setting(model, site, json.dumps({"prompt": PROMPT, "parameters": given}), rounds)
    return found


def _measure_setting(model: Path, site: Path, request: str, rounds: int) -> dict[str, list[float]]:
    commands = {
        "Python, native": [sys.executable, "-c", _PYTHON, str(model), "native", request],
        "Python, function": [sys.executable, "-c", _PYTHON, str(model), "graph", request],
        "Node, function": ["node", str(HERE / "node.mjs"), str(model), request],
        "browser, function": ["node", str(HERE / "browser.mjs"), str(site), request],
    }
    drawn: dict[str, tuple[int, ...]] = {}

    def side(name: str) -> Callable[[], float]:
        def sample() -> float:
            output = subprocess.run(commands[name], check=True, stdout=subprocess.PIPE, text=True).stdout
            answer = json.loads(output.strip().splitlines()[-1])
            drawn[name] = tuple(answer["token_ids"])
            return float(answer["timings"]["decode_steps"] / answer["timings"]["decode_seconds"])

        return sample

    os.environ["TOPW_BROWSER"] = str(BROWSER)
    samples = interleave({name: side(name) for name in SIDES}, rounds, warmup=0)
    for name, ids in drawn.items():
        same = next((i for i, (a, b) in enumerate(zip(ids, drawn[SIDES[0]], strict=True)) if a != b), len(ids))
        if same < len(ids):
            say(f"{name} draws another token than {SIDES[0]} from token {same} on")
    return samples


if __name__ == "__main__":
    main()
