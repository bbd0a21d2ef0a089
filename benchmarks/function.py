"""Time of one sampling step in onnxruntime, against its own TopK and ArgMax. Figures: docs/lab/results.md.

    python -m benchmarks.function [--rounds 400] [--steps certified geometry rules no-branches]

One thread, inputs and outputs bound once, all sides in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper

from benchmarks.common import Spread, interleave, machine, ratio, seconds, table
from topw_deploy.export.embedding import plain_gather
from topw_deploy.export.sampler.node import SamplerSpec
from topw_deploy.export.sampler_only import sampler_model
from topw_deploy.runtime.inputs import rule_arrays
from topw_deploy.sampling import Geometry, pack_mask
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters
from topw_deploy.sampling.rules import RULES, RuleParameters
from topw_lab.bench.logits import likely_logits

VOCAB, NARROW = 151_936, 16  # narrow: certified steps do not read the table
GEOMETRY_VOCAB, HIDDEN = 32_000, 2_048  # fewer tokens, so that several tables fit into memory
GEOMETRY = {"lam": 0.6, "beta": 2.8, "init_top_p": 0.3}  # parameters at which the certificate fails
FORMS = {"branches": True, "no branches": False}
Feeds = dict[str, np.ndarray]


def flat_logits(seed: int = 0) -> np.ndarray:
    """float32 [1, GEOMETRY_VOCAB], normal.

    At T = 2 the certified crop (93 tokens) exceeds the certified path's 64 candidates.
    """
    return (np.random.default_rng(seed).standard_normal((1, GEOMETRY_VOCAB)) * 1.6).astype(np.float32)


def feeds(logits: np.ndarray, **chosen: float) -> Feeds:
    """Inputs of the sampler for one row, without edits."""
    parameters = TopWParameters(**chosen)
    names = TopWParameters.__slots__
    return {
        "logits": logits,
        "edit_ids": np.zeros((1, 0), np.int64),
        "edit_penalty": np.zeros((1, 0), np.float32),
        "edit_bias": np.zeros((1, 0), np.float32),
        "allowed": np.zeros((1, 0), np.int32),
        "uniform": np.array([0.37], np.float32),
        **rule_arrays([RuleParameters()]),
        **{name: np.array([getattr(parameters, name)], np.float32) for name in names},
    }


def edited(logits: np.ndarray) -> Feeds:
    """The same with 16 edits that change nothing."""
    edits: Feeds = {
        "edit_ids": np.arange(16),
        "edit_penalty": np.ones(16, np.float32),
        "edit_bias": np.zeros(16, np.float32),
    }
    return feeds(logits) | {name: values[None] for name, values in edits.items()}


def masked(logits: np.ndarray) -> Feeds:
    """The same with a random half of the tokens allowed."""
    return feeds(logits) | {"allowed": pack_mask(np.random.default_rng(2).random(logits.shape) < 0.5)}


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bound(opened: ort.InferenceSession, inputs: Feeds) -> Callable[[], None]:
    """A run with inputs and outputs bound once."""
    binding = opened.io_binding()
    for value in opened.get_inputs():
        binding.bind_ortvalue_input(value.name, ort.OrtValue.ortvalue_from_numpy(inputs[value.name]))
    for value in opened.get_outputs():
        binding.bind_output(value.name)
    return lambda: opened.run_with_iobinding(binding)


@cache
def random_table(vocab: int, hidden: int) -> tuple[np.ndarray, Geometry]:
    embeddings = np.random.default_rng(1).standard_normal((vocab, hidden), dtype=np.float32)
    return embeddings, Geometry.from_embeddings(embeddings, TopWOptions().metric)


def function(
    vocab: int, hidden: int, branches: bool = True, with_mass: bool = False, rules: tuple[str, ...] = tuple(RULES)
) -> onnx.ModelProto:
    """The sampler-only model over a random table [vocab, hidden]."""
    embeddings, geometry = random_table(vocab, hidden)
    spec = SamplerSpec(
        options=TopWOptions(),
        vocab_size=vocab,
        embedding=plain_gather(vocab, hidden),
        hidden_size=hidden,
        branches=branches,
        with_mass=with_mass,
        rules=rules,
    )
    return ir.to_proto(sampler_model(spec, embeddings, geometry))


def top_k(logits: np.ndarray, k: int = 1200) -> Callable[[], None]:
    """onnxruntime's TopK over the logits."""
    return bound(session(peer("TopK", np.array([k]), outputs=2, vocab=logits.shape[1])), {"logits": logits})


def peer(op_type: str, *constants: np.ndarray, outputs: int = 1, vocab: int = VOCAB) -> onnx.ModelProto:
    """A model of one standard operator over the logits."""
    names = [f"constant_{i}" for i in range(len(constants))]
    results = [f"result_{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op_type, ["logits", *names], results, axis=1)],
        op_type,
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", vocab])],
        [helper.make_empty_tensor_value_info(name) for name in results],
        [onnx.numpy_helper.from_array(value, name) for value, name in zip(constants, names, strict=True)],
    )
    for value, dtype in zip(graph.output, (TensorProto.FLOAT, TensorProto.INT64)[-outputs:], strict=True):
        value.type.tensor_type.elem_type = dtype
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def measure(sides: dict[str, Callable[[], None]], rounds: int, under: str, in_a_row: int = 1) -> str:
    """Microseconds per call, `in_a_row` at a time, and ratios to `under`."""
    timed = {name: (lambda call=call: seconds(call, in_a_row)) for name, call in sides.items()}  # type: ignore[misc]
    samples = interleave(timed, rounds, warmup=max(3, rounds // 20))
    rows = [
        (name, Spread.of(times).format(1e6, 0), f"{min(times) * 1e6:.0f}", ratio(samples, name, under).format())
        for name, times in samples.items()
    ]
    return table(("one row", "median (quartiles), us", "best", f"ratio to {under}"), rows)


def certified_steps(rounds: int) -> str:
    """Certified steps against standard operators, with warm (as after the matmul) and cold caches."""
    logits = likely_logits(VOCAB)
    opened = session(function(VOCAB, NARROW))
    sides = {
        "TopK 1200": top_k(logits),
        "TopK 50": top_k(logits, 50),
        "ArgMax": bound(session(peer("ArgMax")), {"logits": logits}),
        "function, T = 1": bound(opened, feeds(logits)),
        "function, T = 2": bound(opened, feeds(logits, temperature=2.0)),
        "with mass, T = 1": bound(session(function(VOCAB, NARROW, with_mass=True)), feeds(logits)),
        "function, 16 edits": bound(opened, edited(logits)),
        "function, masked": bound(opened, masked(logits)),
    }
    warm = measure(sides, max(5, rounds // 10), "TopK 1200", in_a_row=10)
    cold = measure(sides, rounds, "TopK 1200")
    return f"Ten calls in a row:\n\n{warm}\n\nOne call at a time:\n\n{cold}"


def geometry_steps(rounds: int) -> str:
    """Steps at T = 2 that the candidates do not answer: certified by the pool, and uncertified."""
    logits = likely_logits(GEOMETRY_VOCAB)
    rows = {"flat, certified": feeds(flat_logits(), temperature=2.0)}
    rows["not certified"] = feeds(logits, temperature=2.0, **GEOMETRY)
    sides = {"TopK 1200": top_k(logits)}
    for name, branches in FORMS.items():
        opened = session(function(GEOMETRY_VOCAB, HIDDEN, branches))
        sides |= {f"{name}, {kind}": bound(opened, row) for kind, row in rows.items()}
    return measure(sides, rounds, "TopK 1200")


def rule_steps(rounds: int) -> str:
    """Steps of other rules, which the list of the largest logits proves, and which need the whole vocabulary."""
    logits = likely_logits(VOCAB)
    rules = {
        "top-k 50": RuleParameters(top_k=50),
        "top-p 0.9": RuleParameters(top_p=0.9),
        "min-p 0.05": RuleParameters(min_p=0.05),
        "Top-H 0.4": RuleParameters(rule="top_h"),
        "typical 0.9": RuleParameters(typical_p=0.9),
        "epsilon 0.001": RuleParameters(epsilon_cutoff=0.001),
        "eta 0.002": RuleParameters(eta_cutoff=0.002),
        "top-n-sigma 1": RuleParameters(top_n_sigma=1.0),
        "p-less": RuleParameters(rule="p_less"),
        "min-k": RuleParameters(rule="min_k"),
        "top-p 0.99": RuleParameters(top_p=0.99),
        "none": RuleParameters(rule="none"),
    }
    sides = {"TopK 1200": top_k(logits)}
    opened = session(function(VOCAB, NARROW))
    for name, rule in rules.items():
        sides[name] = bound(opened, feeds(logits) | rule_arrays([rule]))
    return measure(sides, rounds, "TopK 1200")


def steps_without_branches(rounds: int) -> str:
    """Steps of functions without branches, exported with different `--rules`. All rows use Top-W."""
    logits = likely_logits(VOCAB)
    sides = {"TopK 1200": top_k(logits)}
    for rules in ((), *((name,) for name in RULES if name != "top_w"), tuple(RULES)):
        name = ", ".join(rules) if len(rules) < len(RULES) else "all"
        sides[f"Top-W and {name}" if rules else "Top-W alone"] = bound(
            session(function(VOCAB, NARROW, False, rules=rules)), feeds(logits)
        )
    return measure(sides, rounds, "TopK 1200")


def main() -> None:
    tables: dict[str, tuple[str, Callable[[int], str], int]] = {
        "certified": (f"Certified steps, vocabulary {VOCAB:,}", certified_steps, 1),
        "rules": (f"Other rules, vocabulary {VOCAB:,}", rule_steps, 20),
        "no-branches": (f"Without branches, vocabulary {VOCAB:,}", steps_without_branches, 20),
        "geometry": (f"Uncertified steps, vocabulary {GEOMETRY_VOCAB:,}, d = {HIDDEN:,}", geometry_steps, 20),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--steps", nargs="+", choices=tuple(tables), default=list(tables))
    given = parser.parse_args()
    print(f"{machine()}; 1 thread")
    for name in given.steps:
        title, measured, fewer = tables[name]
        print(f"\n{title}:\n\n{measured(max(5, given.rounds // fewer))}", flush=True)


if __name__ == "__main__":
    main()
