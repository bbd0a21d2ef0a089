"""Print one hash of the generated tokens per case: families, rules, parameters, batches, the engine, the C++ program.

    python -m fuzz.tokens [--out FILE] [--before FILE]

Run it at two commits on one machine to show that a change of structure changes no token. With --before, it compares
with the other file and exits with 1 if a case differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.examples.cpp_host import compiled, library_of, native_library
from tests.support.hybrid_models import HYBRIDS, make_hybrid
from tests.support.rows import random_case
from tests.support.tiny_models import FAMILIES, export, make_model, write_tokenizer
from topw_deploy.engine import Engine
from topw_deploy.runtime import TopWModel, TopWSampler

Case = tuple[str, Callable[[], Any]]
TINY = "tiny"
_HYBRIDS = 6
_LIVELY: dict[str, Any] = {"lam": 0.5, "beta": 2.8, "temperature": 1.5, "init_top_p": 0.3}
_RULES: dict[str, dict[str, Any]] = {
    "top_w": {},
    "lively": {"preset": "lively"},
    "none": {"rule": "none"},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.9},
    "epsilon_cutoff": {"epsilon_cutoff": 3e-4},
    "eta_cutoff": {"eta_cutoff": 3e-4},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "min_k_tau": {"min_k_tau": 3.0},
    "greedy": {"temperature": 0},
}
_CALLS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bans": {"no_repeat_ngram_size": 3, "logit_bias": {5: 2.0, 9: -3.0}, "suppress_tokens": [11, 12]},
    "stop": {"stop_strings": ["the", "\n\n"], "min_new_tokens": 5},
    "samples": {"num_return_sequences": 3, **_LIVELY},
    "regex": {"structured_outputs": {"regex": "[a-z]{3,12}( [a-z]+){2}"}},
    "schema": {
        "structured_outputs": {
            "json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "maxProperties": 1}
        },
        "max_new_tokens": 60,
    },
    "long": {"max_new_tokens": 200, **_LIVELY},
}


def _tokens(results: Any) -> list[list[int]]:
    return [list(r.token_ids) for r in (results if isinstance(results, list) else [results])]


def _calls(model: TopWModel, prompts: list[Any], settings: dict[str, dict[str, Any]]) -> Iterator[Case]:
    for number, (name, parameters) in enumerate(settings.items()):
        given = {"max_new_tokens": 24, "seed": 100 + number, **parameters}
        yield name, partial(lambda given: _tokens(model.generate(prompts[0], **given)), given)


def _batch_and_engine(model: TopWModel, prompts: list[Any]) -> Iterator[Case]:
    yield "stream", lambda: [i for d in model.stream(prompts[1], seed=4, max_new_tokens=24) for i in d.token_ids]
    if model.manifest.decoder.right_padding or model.manifest.decoder.left_padding:
        yield "batch", lambda: _tokens(model.generate(prompts, seed=[1, 2, 3], max_new_tokens=20, **_LIVELY))
        rules: dict[str, Any] = {
            "temperature": [1.0, 1.5, 0.7],
            "min_p": [0.05, None, None],
            "top_p": [None, 0.9, None],
        }
        yield "batch of rules", lambda: _tokens(model.generate(prompts, seed=7, max_new_tokens=20, **rules))

    def engine() -> list[list[int]]:
        with Engine(model, max_batch=3) as running:
            handles = [
                running.submit(prompts[i % 3], seed=i, max_new_tokens=12 + i, **(_LIVELY if i % 2 else {}))
                for i in range(6)
            ]
            return [t for handle in handles for t in _tokens(handle.result())]

    yield "engine", engine


def _family_cases(work: Path) -> Iterator[Case]:
    names = [*FAMILIES, *list(HYBRIDS)[:_HYBRIDS]]
    for family in names:
        checkpoint = work / family
        (make_model(family) if family in FAMILIES else make_hybrid(family)).save_pretrained(checkpoint)
        write_tokenizer(checkpoint)
        export(checkpoint, work / f"{family}-out")
        with TopWModel.from_pretrained(work / f"{family}-out", intra_op_num_threads=1) as model:
            prompts = [[3, 7, 11, 20, 5], [9, 8, 7], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51]]
            chosen = {name: _RULES[name] for name in ("top_w", "top_p", "lively")}
            for name, run in (*_calls(model, prompts, chosen), *_batch_and_engine(model, prompts)):
                yield f"{family}: {name}", run


def _tiny_cases(work: Path) -> Iterator[Case]:
    prompts = ["class Path", "def parse(", "The following functions return a list of"]
    variants = {"fp32": {}, "int4": {"dtype": "int4"}, "int8": {"dtype": "int8"}}
    for variant, settings in variants.items():
        export(TINY, work / variant, **settings)
        for sampler in ("native", "graph"):
            with TopWModel.from_pretrained(work / variant, sampler=sampler, intra_op_num_threads=1) as model:
                calls = {**_RULES, **_CALLS} if variant == "fp32" or sampler == "native" else _RULES
                for name, run in (*_calls(model, prompts, calls), *_batch_and_engine(model, prompts)):
                    yield f"tiny {variant}, {sampler}: {name}", run


def _output(words: list[str]) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _cpp_cases(work: Path) -> Iterator[Case]:
    import onnxruntime

    program, library = compiled(work / "topw_host"), library_of(Path(onnxruntime.__file__).parent)
    sets = [[], ["--temperature", "1.5", "--lam", "0.5"], ["--temperature", "0"], ["--repetition-penalty", "1.3"]]
    for native in (True, False):
        for number, options in enumerate(sets):
            command = [program, work / "fp32", "--seed", 5 + number, "--max-new-tokens", 24, *options, "--threads", 1]
            command += ["--onnxruntime", library, *(["--native-library", native_library()] if native else [])]
            words = [str(word) for word in (*command, 3, 70, 11)]
            yield (
                f"C++, {'native' if native else 'graph'}: {' '.join(options)}",
                partial(_output, words),
            )


def _kept_sets(work: Path) -> Iterator[Case]:
    command = [sys.executable, "-m", "topw_deploy", "export-sampler", TINY, work / "sampler", "--with-keep-mask"]
    subprocess.run([*map(str, command), "--no-verify", "--quiet"], check=True)
    for sampler, batches in (("native", 100), ("graph", 12)):
        opened = TopWSampler.from_pretrained(work / "sampler", sampler=sampler, intra_op_num_threads=1)
        rng = np.random.default_rng(11)

        def kept(opened: TopWSampler = opened, rng: np.random.Generator = rng) -> list[bytes]:
            """Kept sets, tokens and certificates of 20 rows."""
            cases = [random_case(rng, opened.vocab_size) for _ in range(20)]
            answers = [opened.sample(c.logits[None], uniform=c.uniform, **dict[str, Any](c.parameters)) for c in cases]
            return [
                np.packbits(np.asarray(a.keep_mask, bool)).tobytes() + a.next_token.tobytes() + a.certified.tobytes()
                for a in answers
            ]

        for batch in range(batches):
            yield f"kept sets, {sampler}: {20 * batch}", kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    hashes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for cases in (_tiny_cases, _cpp_cases, _kept_sets, _family_cases):
            for name, run in cases(work):
                hashes[name] = hashlib.sha256(repr(run()).encode()).hexdigest()[:16]
                print(f"{hashes[name]}  {name}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    if options.before:
        before = json.loads(options.before.read_text("utf-8"))
        differ = [name for name in before if before[name] != hashes.get(name)]
        print(f"{len(before) - len(differ)} of {len(before)} cases equal")
        print(*differ, sep="\n")
        sys.exit(bool(differ))


if __name__ == "__main__":
    main()
