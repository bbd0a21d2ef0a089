"""What the restriction to prefixes costs under the exact objective, on small rows. Results: docs/lab/results.md.

    python -m benchmarks.exact_subsets [--rows 200] [--tokens 8]

Takes the `--tokens` likeliest tokens of held-out rows of the bundled model, renormalised. Compares the best of all
subsets with the best prefix of the probability order, the best prefix of Top-W's last order, and Top-W's set. Needs
the extra `exact`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import say, table
from benchmarks.corpus import gather_corpus
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, preset_parameters
from topw_deploy.sampling.reference import candidate_pool
from topw_deploy.tiny import TINY_MODEL
from topw_lab.stats.exact import Floats, Objective, equal_objectives, last_alternation

METRIC, WIDTH = "mahalanobis", 256  # of the bundled model
LIVELY = TopWParameters(**preset_parameters("lively", METRIC, WIDTH))
SETTINGS: Mapping[str, TopWParameters] = {
    "`paper`": TopWParameters(),
    "`paper`, geom_scale 0.0663": TopWParameters(geom_scale=LIVELY.geom_scale),
    "`paper`, geom_scale 0.02": TopWParameters(geom_scale=0.02),
    "`lively`": LIVELY,
    "`lively`, geom_scale 0.2": replace(LIVELY, geom_scale=0.2),
}
HEADER = (
    "parameters", "best subset, tokens", "best subset is a prefix", "prefix above it, mean", "most",
    "phi prefix above it, mean", "Top-W's kept set is the best subset", "above it, mean", "most",
)  # fmt: skip


def held_out_logits(rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits [rows, V] at random positions, and the embedding table [V, d]."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
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
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    logits, embeddings = held_out_logits(args.rows)
    geometry = Geometry.from_embeddings(embeddings, METRIC)
    rows = []
    for row in logits.astype(np.float64):
        tokens, _ = candidate_pool(row, args.tokens)
        rows.append((row[tokens] - row[tokens[0]], geometry.distances(tokens, tokens)))
    say(f"{len(rows)} rows, {args.tokens} tokens, temperature 1")
    print(table(HEADER, [[name, *_table_cells(rows, parameters)] for name, parameters in SETTINGS.items()]))


def _table_cells(rows: Sequence[tuple[Floats, Floats]], parameters: TopWParameters) -> list[str]:
    found = [_row_objectives(log_w, parameters.geom_scale * distance, parameters) for log_w, distance in rows]
    sizes, subset, prefix, phi, top_w = np.array(found).T
    equal = [
        [equal_objectives(value, least) for value, least in zip(values, subset, strict=True)]
        for values in (prefix, top_w)
    ]
    return [
        f"{sizes.mean():.1f}",
        f"{np.mean(equal[0]):.1%}",
        f"{(prefix - subset).mean():.4f}",
        f"{(prefix - subset).max():.4f}",
        f"{(phi - subset).mean():.4f}",
        f"{np.mean(equal[1]):.1%}",
        f"{(top_w - subset).mean():.3f}",
        f"{(top_w - subset).max():.3f}",
    ]


def _row_objectives(log_w: Floats, distance: Floats, parameters: TopWParameters) -> list[float]:
    """Values for one row: the size of the best subset, then four values of F.

    F of the best subset, of the best prefix, of the best prefix of Top-W's last order, and of Top-W's kept set.
    """
    n, w = len(log_w), np.exp(log_w)
    F = Objective(w / w.sum(), distance, parameters.lam, parameters.beta)
    kept, order = last_alternation(log_w, distance, parameters, TopWOptions())
    members = (np.arange(1, 2**n)[:, None] >> np.arange(n)) & 1 == 1
    best = min((F(S) for S in members), key=lambda value: value.total)
    prefixes = [F.best_prefix(places).total for places in (np.arange(n), order)]
    return [best.kept, best.total, *prefixes, F(np.isin(np.arange(n), kept)).total]


if __name__ == "__main__":
    main()
