"""How often geometry decides a crop, by the reference over the bundled model's held-out logits.

    python -m benchmarks.geometry_share [--rows 400] [--temperature 0.5 0.7 1 1.5 2]

Figures: docs/lab/benchmarks.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import machine, table
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, crop
from topw_deploy.tiny import tiny_model_path
from topw_deploy.tiny.corpus import gather_corpus

SETTINGS = {
    "defaults": TopWParameters(),
    "lam 1": TopWParameters(lam=1.0),
    "init_top_p 0.9": TopWParameters(init_top_p=0.9),
    "lam 1, init_top_p 0.9": TopWParameters(lam=1.0, init_top_p=0.9),
    "lam 0.5, init_top_p 0.5": TopWParameters(lam=0.5, init_top_p=0.5),
}


def held_out_logits(rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits [rows, V] at random positions, and the embedding table [V, d]."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32).eval()
    random = np.random.default_rng(0)
    found: list[NDArray[np.float32]] = []
    for text in gather_corpus().held_out:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=512).input_ids
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].numpy()
        found.extend(logits[random.choice(len(logits), min(len(logits), 8), replace=False)])
        if len(found) >= rows:
            break
    return np.stack(found[:rows]), model.get_input_embeddings().weight.detach().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.5, 0.7, 1.0, 1.5, 2.0])
    args = parser.parse_args()
    logits, embeddings = held_out_logits(args.rows)
    options = TopWOptions()
    geometry = Geometry.from_embeddings(embeddings, options.metric)
    lines = []
    for name, setting in SETTINGS.items():
        for temperature in args.temperature:
            parameters = replace(setting, temperature=temperature)
            flat = replace(parameters, geom_scale=0.0)
            certified, changed, kept = 0, 0, []
            for row in logits:
                chosen = crop(row, parameters, options, geometry)
                kept.append(len(chosen.kept))
                certified += chosen.certified
                # Scale does not change a certified crop (docs/contract/theory.md, T2).
                changed += not chosen.certified and set(chosen.kept) != set(crop(row, flat, options, geometry).kept)
            share = [f"{count / len(logits):.1%}" for count in (certified, changed)]
            sizes = f"{np.mean(kept):.1f}", f"{np.median(kept):.0f}", max(kept)
            lines.append((name, temperature, *share, *sizes))
    print(f"{machine()}; {len(logits)} rows of held-out text\n")
    header = ("parameters", "temperature", "certified", "geometry changed the crop", "kept, mean", "median", "largest")
    print(table(header, lines))


if __name__ == "__main__":
    main()
