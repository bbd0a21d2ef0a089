"""examples/cpp draws the same tokens as TopWModel from a prompt of token ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from msgspec.structs import replace
from onnx import TensorProto, helper

from tests.examples.cpp_host import FORMS, Host, compare, fails, ids_of, native_library, options_of, rewritten
from tests.support.toy_model import EOS, Toy, export
from topw_deploy.manifest import load_decoder_manifest, load_manifest
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sampler", ["graph", "native"])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_equal_the_python_runtimes(form: str, sampler: str, host: Host, folders: dict[str, Path]) -> None:
    library = ["--native-library", native_library()] if sampler == "native" else []
    with TopWModel.from_pretrained(folders[form], provider="cpu", intra_op_num_threads=1, sampler=sampler) as model:
        compare(host, model, folders[form], ["a", "some longer prompt than that"], *library)


@pytest.mark.long
def test_the_bundled_model_draws_the_same_tokens_with_both_caches(
    host: Host, demo_export: Path, tmp_path: Path
) -> None:
    from topw_deploy.export import export_model

    concat = tmp_path / "concat"
    export_model("tiny", concat, verify=False, kv="concat", dtype="fp16")
    for folder in (demo_export, concat):
        with TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1) as model:
            assert load_manifest(folder).decoder.kv_form == ("concat" if folder == concat else "static")  # type: ignore[union-attr]
            for seed, parameters in enumerate(({}, {"lam": 1.5, "temperature": 0.8})):
                expected = model.generate("class Path", seed=seed, max_new_tokens=60, **parameters)
                prompt = model.tokenizer.encode("class Path")
                given = ["--seed", seed, "--max-new-tokens", 60, *options_of(parameters)]
                assert ids_of(host(folder, *given, *prompt)) == expected.token_ids


def narrow_cache(element_type: int) -> Callable[[onnx.ModelProto], None]:
    """A 16-bit cache represents the toy's features, small integers, exactly."""

    def change(model: onnx.ModelProto) -> None:
        graph, nodes = model.graph, []
        names = {value.name for value in graph.output if value.name.startswith("present.")}
        for value in (*graph.input, *graph.output):
            if value.name.startswith(("present.", "past_key_values.")):
                value.type.tensor_type.elem_type = element_type
        for node in graph.node:
            inputs = list(node.input)
            if names.intersection(node.output):  # the Concat, with 16-bit new tokens
                nodes.append(helper.make_node("Cast", [inputs[1]], [f"narrow_{node.output[0]}"], to=element_type))
                node.input[1] = f"narrow_{node.output[0]}"
            else:
                for place, name in enumerate(inputs):
                    if name in names:
                        nodes.append(helper.make_node("Cast", [name], [f"wide_{name}"], to=TensorProto.FLOAT))
                        node.input[place] = f"wide_{name}"
            nodes.append(node)
        del graph.node[:]
        graph.node.extend(nodes)

    return change


@pytest.mark.parametrize("form", ["concat", "scatter"])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_caches_of_sixteen_bits_are_supported(
    name: str, form: str, host: Host, folders: dict[str, Path], tmp_path: Path
) -> None:
    change = narrow_cache(TensorProto.DataType.Value(name.upper()))
    states = load_decoder_manifest(folders[form]).decoder.states
    narrow = tuple(replace(state, dtype=name) for state in states)
    folder = rewritten(folders[form], tmp_path / name, change, kv_dtype=name, states=narrow)
    with TopWModel.from_pretrained(folders[form], provider="cpu", sampler="graph") as model:
        compare(host, model, folder, ["sixteen bits"])


def test_fixed_sizes_of_the_graph_are_respected(host: Host, folders: dict[str, Path], tmp_path: Path) -> None:
    """Three edit slots, padded with no-op edits, and a cache of 40 tokens."""

    def change(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            sizes = value.type.tensor_type.shape.dim
            if value.name.startswith("edit_"):
                sizes[1].dim_value = 3
            if value.name.startswith(("present.", "past_key_values.")):
                sizes[2].dim_value = 40

    folder, given = rewritten(folders["scatter"], tmp_path / "fixed", change), ["--seed", 5, "--max-new-tokens"]
    biases = ["--logit-bias", "60=9", "--logit-bias", "61=9", "--logit-bias", "62=9"]
    for edits in ([], biases):
        drawn = ids_of(host(folders["scatter"], *given, 20, *edits, *range(50, 70)))
        assert ids_of(host(folder, *given, 20, *edits, *range(50, 70))) == drawn
    fails(host(folder, *given, 21, *range(50, 70)), 1, "41 tokens", "holds 40", "--max-new-tokens")
    fails(host(folder, *given, 9, *biases, "--suppress-tokens", 63, 50), 1, "edits more than 3 tokens", "more slots")


# Ends of an answer, and sources of values.


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers a one-token prompt with 10, 11, the end of sequence, 12, 13."""
    toy, defaults = Toy.script([10, 11, EOS, 12, 13], prompt_tokens=1), {"eos_token_id": [77, EOS], "lam": 0.9}
    return export(tmp_path_factory.mktemp("script") / "export", toy, generation_config=defaults)


def test_an_end_of_sequence_ends_the_answer_and_is_printed(host: Host, script: Path) -> None:
    assert ids_of(host(script, "--max-new-tokens", 5, 50)) == [10, 11, EOS]
    assert ids_of(host(script, "--max-new-tokens", 5, "--eos", 99, "--eos", 11, 50)) == [10, 11]
    assert ids_of(host(script, "--max-new-tokens", 5, "--ignore-eos", 50)) == [10, 11, EOS, 12, 13]
    assert ids_of(host(script, "--max-new-tokens", 0, 50)) == []


def test_an_end_of_sequence_is_found_in_the_models_configuration(host: Host, tmp_path: Path) -> None:
    folder = export(tmp_path / "export", Toy.script([10, EOS, 12], prompt_tokens=1))
    assert ids_of(host(folder, 50)) == [10, EOS]
    inner = {"text_config": {"eos_token_id": [EOS]}}
    composite = rewritten(folder, tmp_path / "composite", lambda _: None, config=inner)
    assert ids_of(host(composite, 50)) == [10, EOS]
    silent = rewritten(folder, tmp_path / "silent", lambda _: None, config={})
    done = host(silent, "--max-new-tokens", 3, 50)
    assert ids_of(done) == [10, EOS, 12]
    assert done.stderr == "note: the model states no end of sequence; see --eos\n"


def test_a_prompt_comes_from_standard_input_too(host: Host, folders: dict[str, Path]) -> None:
    given = [folders["concat"], "--seed", 3, "--max-new-tokens", 9]
    assert ids_of(host(*given, stdin=" 50\n51 52")) == ids_of(host(*given, 50, 51, 52))


def test_the_statistics_equal_those_of_the_python_runtime(host: Host, folders: dict[str, Path]) -> None:
    given = {"lam": 1.2, "temperature": 2, "init_top_p": 0.9}
    with TopWModel.from_pretrained(folders["scatter"], provider="cpu", sampler="graph") as model:
        expected = model.generate([50, 51], seed=11, max_new_tokens=30, **given)
    line = host(folders["scatter"], "--stats", "--seed", 11, "--max-new-tokens", 30, *options_of(given), 50, 51).stderr
    share, kept = 100 * expected.certified_share, np.mean(expected.kept)
    assert 0 < share < 100
    assert line.startswith("30 tokens after 2 (length), the first in ")
    assert f"; certified {share:.1f} %, kept {kept:.2f} on average; seed 11; onnxruntime {ort.__version__}\n" in line
