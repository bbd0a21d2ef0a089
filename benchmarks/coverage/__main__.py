"""Export tiny random models of the decoder-only architectures in transformers' causal-LM map; compare with torch.

python -m benchmarks.coverage --again              (every form, two to three hours; docs/models.md, from the start)
python -m benchmarks.coverage                      (only what results.json lacks, such as the rest of a run)
python -m benchmarks.coverage --only llama mamba2 --forms default --again
python -m benchmarks.coverage --write              (then write docs/models.md from the results)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.coverage.architectures import decoder_only_types
from benchmarks.coverage.page import PAGE, page
from benchmarks.coverage.peers import read_peers
from benchmarks.coverage.runner import FORMS, RESULTS, SECONDS, ResultFile, run_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="exports at a time; default 1")
    parser.add_argument("--again", action="store_true", help="repeat finished exports")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of one export; default %(default)s")
    parser.add_argument("--write", action="store_true", help="write docs/models.md from the results")
    asked = parser.parse_args()
    known = decoder_only_types()
    unknown = sorted(set(asked.only or ()) - set(known))
    if unknown:
        parser.error(f"{', '.join(unknown)}: not a decoder-only type of transformers' causal-LM map")
    file = ResultFile(asked.results)
    wanted = [(model_type, form) for form in asked.forms for model_type in asked.only or known]
    run_all(wanted, file, asked.jobs, asked.seconds, asked.again)
    if asked.write:
        PAGE.write_text(page(file, read_peers()), "utf-8")


if __name__ == "__main__":
    main()
