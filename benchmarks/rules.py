"""ms per token by sampling rule, with a trained model's logits (the paper's table 7). Figures: docs/lab/results.md.

    python -m benchmarks.rules [--vocab 32000 151936] [OPTIONS of `topw bench rules`]

The models are the bundled one, grown (benchmarks/trained_rows.py), and continue a text.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.common import say
from benchmarks.models import export_once
from benchmarks.trained_rows import trained_model

PROMPT = "class Path(os.PathLike):\n    Return a new path with the"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 151_936])
    args, rest = parser.parse_known_args()
    folders = []
    for vocab in args.vocab:
        say(f"vocabulary {vocab:,}")
        folders.append(str(export_once(trained_model(vocab))))
    command = [sys.executable, "-m", "topw_deploy", "bench", "rules", *folders, "--prompt", PROMPT, *rest]
    raise SystemExit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
