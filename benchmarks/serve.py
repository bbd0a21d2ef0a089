"""`topw bench serve` with onnxruntime-genai's Engine and llama.cpp, same weights. Results: docs/lab/results.md.

    python -m benchmarks.serve --model demo llama-50m --dtype fp32 int4 [--genai-python PYTHON] [--llama-python PYTHON]
        [--concurrency 1 4 16 64] [--threads 1 2] [--rounds 3] [--json FOLDER]
    python -m benchmarks.serve --gguf FILE [--export FOLDER] --llama-python PYTHON

The first PYTHON has onnxruntime-genai, the second llama-cpp-python and gguf. Exports, genai's graphs and GGUF files
are created once and kept. --gguf compares a GGUF file's export, or FOLDER, with llama.cpp on the same file. int4 is
genai's default quantisation, in blocks of 32, for both graphs, and Q4_0 for llama.cpp.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.common import add_repository_to_pythonpath, say
from benchmarks.int4 import llama_files
from benchmarks.kinds import genai_folder
from benchmarks.kv import AS_GENAI
from benchmarks.models import CACHE, export_once, llama_50m
from topw_deploy.cli.terminal import progress
from topw_deploy.tiny import TINY_MODEL
from topw_lab.bench.base import Side
from topw_lab.bench.serve import make_requests, run
from topw_lab.worker import Worker

HERE = Path(__file__)
GGUF = {"fp32": "F32", "int4": "Q4_0"}
ROWS = 16  # sequences that an engine runs at once
_ALIGNMENT = 256  # llama.cpp rounds a sequence's maximum length up to a multiple of this


def model_folder(name: str) -> Path:
    return TINY_MODEL if name == "demo" else llama_50m()


def genai_side(model: Path, dtype: str, python: Path) -> Side:
    folder = genai_folder(model, dtype, python.absolute())
    return Side(
        name="genai",
        label="onnxruntime-genai's Engine",
        kind="peer",
        worker=HERE.with_name("serve_genai_worker.py"),
        do="serve",
        settings={"folder": str(folder.absolute())},
        python=python,
    )


def gguf_file(model: Path, kind: str, python: Path) -> Path:
    """The checkpoint as a GGUF file of the type `kind`."""
    work = CACHE / "gguf"
    work.mkdir(parents=True, exist_ok=True)
    with Worker("llama.cpp", HERE.with_name("llama_cpp_worker.py"), {"threads": 1}, python=python) as worker:
        return llama_files(worker, model, [kind] if kind != "F32" else [], work)[kind]


def llama_side(file: Path, python: Path, longest: int, callers: int) -> Side:
    """longest: tokens of the longest sequence. callers: the largest number of callers."""
    length = -(-longest // _ALIGNMENT) * _ALIGNMENT
    return Side(
        name="llama",
        label=f"llama.cpp, {file.stem}, batches as its server's",
        kind="peer",
        worker=HERE.with_name("serve_llama_worker.py"),
        do="serve",
        settings={"file": str(file.absolute()), "rows": min(ROWS, callers), "length": length},
        python=python,
    )


def measure_model(name: str, dtype: str, args: argparse.Namespace) -> None:
    """Measure one model. Prints its tables and writes its files. name, dtype: of a GGUF file, its stem and "kept"."""
    if args.gguf is None:
        model = model_folder(name)
        folder = export_once("tiny" if name == "demo" else model, "--dtype", dtype, *AS_GENAI.get(dtype, ()))
    else:
        folder = args.export or export_once(args.gguf)
    lengths = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens, "seed": args.seed}
    others = []
    if args.genai_python is not None and args.gguf is None:
        others.append(genai_side(model, dtype, args.genai_python))
    if args.llama_python is not None:
        callers = max(args.concurrency)
        requests = make_requests(folder, max(args.requests, callers), **lengths)
        longest = max(len(prompt) for prompt, _ in requests) + max(new for _, new in requests)
        file = args.gguf or gguf_file(model, GGUF[dtype], args.llama_python)
        others.append(llama_side(file, args.llama_python, longest, callers))
    say(f"{name}, {dtype}")
    report = run(
        folder,
        concurrency=args.concurrency,
        requests=args.requests,
        rows=ROWS,
        threads=args.threads,
        rounds=args.rounds,
        peers=args.peers,
        progress=progress(False),
        others=others,
        **lengths,
    )
    print(f"\n{report.text()}", flush=True)
    if args.json is not None:
        parts = (name, dtype, "threads", *args.threads, "callers", *args.concurrency)
        file = args.json / f"{'-'.join(map(str, parts))}.json"
        file.write_text(json.dumps(report.as_dict(), indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["demo", "llama-50m"], choices=("demo", "llama-50m"))
    parser.add_argument("--dtype", nargs="+", default=["fp32", "int4"], choices=tuple(GGUF))
    parser.add_argument("--gguf", type=Path, help="compare this file's export and llama.cpp, no other model")
    parser.add_argument("--export", type=Path, help="the folder of that export")
    parser.add_argument("--genai-python", type=Path, help="interpreter of the environment with onnxruntime-genai")
    parser.add_argument("--llama-python", type=Path, help="interpreter of the environment with llama-cpp-python, gguf")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--peers", nargs="+", default=(), help="run only these sides")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="folder for the results")
    args = parser.parse_args()
    add_repository_to_pythonpath()
    if args.gguf is not None:
        measure_model(args.gguf.stem, "kept", args)
        return
    for name in args.model:
        for dtype in args.dtype:
            measure_model(name, dtype, args)


if __name__ == "__main__":
    main()
