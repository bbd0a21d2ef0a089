"""Every tensor of a checkpoint is read, merged, or ignored by a named rule; any other is an error that names it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Starcoder2Config

from benchmarks.coverage.tiny_models import write_checkpoint as write_coverage_checkpoint
from tests.export.source.composite_models import write_composite
from tests.export.source.quantised_checkpoints import round_for_awq, round_for_gptq, write_quantised
from tests.support.editing import edit_json, edit_tensors
from tests.support.tiny_models import COMMON, export, make_model, write_checkpoint
from topw_deploy.errors import SourceError, UnsupportedModelError
from topw_deploy.export.source import checkpoint
from topw_deploy.export.source.checkpoint import load_during_calls, load_reference, load_unread
from topw_deploy.export.source.files import stored_tensors
from topw_deploy.manifest import SourceTensors, load_decoder_manifest

IDS = torch.arange(3, 15)[None]
LAYER = "model.layers.0.self_attn"


def write(folder: Path, family: Any = "llama_untied", **extra: torch.Tensor) -> Path:
    """A checkpoint with more tensors. extra: by name."""
    make_model(family).save_pretrained(folder)
    edit_tensors(folder, lambda tensors: tensors | extra)
    return folder


def used(folder: Path, **how: Any) -> SourceTensors:
    return load_unread(folder, "float32", **how)[2]


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


UNREAD = {
    "bias": (f"{LAYER}.q_proj.bias", torch.ones(64), "announces no such bias"),
    "head's bias": ("lm_head.bias", torch.ones(320), "announces no such bias"),
    "scale": (f"{LAYER}.q_proj.weight_scale", torch.ones(1), "restore its quantization_config"),
    "inverse scale": (f"{LAYER}.q_proj.weight_scale_inv", torch.ones(2, 1), "restore its quantization_config"),
    "input scale without quantisation": (f"{LAYER}.q_proj.input_scale", torch.ones(1), "quantization_config"),
    "codes of a layer": (f"{LAYER}.extra.qweight", torch.ones(4, 4, dtype=torch.int32), "quantization_config"),
    "adapter": (f"{LAYER}.q_proj.lora_A.weight", torch.ones(4, 32), "merge_and_unload"),
    "layer": ("model.layers.2.mlp.up_proj.weight", torch.ones(48, 32), "num_hidden_layers 2"),
    "value head": ("v_head.summary.weight", torch.ones(1, 32), "remove the tensor"),
    "bias that looks like a mask": (f"{LAYER}.bias", torch.ones(32), "announces no such bias"),
}


@pytest.mark.parametrize("how", UNREAD)
def test_a_tensor_that_nobody_reads_is_named(how: str, tmp_path: Path) -> None:
    name, tensor, advice = UNREAD[how]
    write(tmp_path, **{name: tensor})
    for load in (load_unread, load_reference):
        with pytest.raises(SourceError, match=rf"does not read {name} \(.*{advice}"):
            load(tmp_path, "float32")


@pytest.mark.parametrize(
    ("family", "name", "shape", "message"),
    [
        ("llama_untied", "model.model.norm.weight", (32,), r"does not read model\.(model\.)?norm\.weight"),
        ("llama_tied", "language_model.lm_head.weight", (320, 32), r"differs from model\.embed_tokens.*tie_word_emb"),
    ],
)
def test_of_two_tensors_for_one_parameter_the_one_that_was_not_read_is_named(
    family: str, name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    write(tmp_path, family, **{name: torch.ones(shape)})
    with pytest.raises(SourceError, match=message):
        load_unread(tmp_path, "float32")


def test_a_tensor_of_a_pytorch_file_and_one_beside_its_index_are_named(tmp_path: Path) -> None:
    model = make_model("llama_untied")
    model.config.save_pretrained(tmp_path / "bin")
    torch.save(model.state_dict() | {"extra": torch.ones(2)}, tmp_path / "bin" / "pytorch_model.bin")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    shard = sorted((tmp_path / "shards").glob("*.safetensors"))[0]
    save_file(load_file(shard) | {"extra": torch.ones(2)}, shard, {"format": "pt"})
    for folder in ("bin", "shards"):
        with pytest.raises(SourceError, match="does not read extra "):
            load_unread(tmp_path / folder, "float32")


IGNORED = {
    "rotary frequencies": {f"{LAYER}.rotary_emb.inv_freq": torch.ones(8)},
    "causal mask": {
        f"{LAYER.replace('self_attn', 'attn')}.bias": torch.ones(1, 1, 8, 8).tril(),
        f"{LAYER.replace('self_attn', 'attn')}.masked_bias": torch.tensor(-1e4),
    },
    "multi-token prediction": {"mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4), "mtp.norm.weight": torch.ones(4)},
    "not of the text decoder": {"vision_tower.blocks.0.weight": torch.ones(4, 4)},
    "bias of zeros": {f"{LAYER}.q_proj.bias": torch.zeros(64)},
}


@pytest.mark.parametrize("rule", IGNORED)
def test_a_rule_ignores_a_tensor_and_the_count_is_kept(rule: str, tmp_path: Path) -> None:
    write(tmp_path, **IGNORED[rule])
    found = used(tmp_path)
    assert {tensors.rule for tensors in found.ignored} == {rule}
    assert sum(tensors.count for tensors in found.ignored) == len(IGNORED[rule])
    assert found.read == len(stored_tensors(tmp_path)) - len(IGNORED[rule])


def test_layers_that_predict_later_tokens_need_their_number_in_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, **{"model.layers.2.mlp.up_proj.weight": torch.ones(48, 32)})
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=1)
    (ignored,) = used(tmp_path).ignored
    assert (ignored.names, ignored.count, ignored.rule) == (
        "model.layers.*.mlp.up_proj.weight",
        1,
        "multi-token prediction",
    )


@pytest.mark.parametrize(
    ("family", "layer", "rule"),
    [
        ("deepseek_v32", 61, "multi-token prediction"),
        ("glm_moe_dsa", 78, "multi-token prediction"),
        ("hy_v3", 80, "multi-token prediction"),
        ("axk1", 0, "norm behind experts, in a layer without experts"),
        ("hy_v3", 79, None),
    ],
)
def test_tensors_that_published_models_have_beyond_their_configuration_are_ignored(
    family: str, layer: int, rule: str | None, tmp_path: Path
) -> None:
    """transformers drops them by lists of its classes."""
    write_coverage_checkpoint(family, tmp_path)
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=0)
    edit_tensors(tmp_path, lambda tensors: tensors | {f"model.layers.{layer}.post_mlp_layernorm.weight": torch.ones(4)})
    if rule is None:
        with pytest.raises(SourceError, match=rf"does not read model\.layers\.{layer}\..*correct the number"):
            load_unread(tmp_path, "float32")
    else:
        assert [tensors.rule for tensors in used(tmp_path).ignored] == [rule]


def test_code_that_changes_its_weights_gets_them_in_memory_under_the_same_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load with values accounts by transformers' names, before transformers drops those that it ignores."""
    make_model("gpt2").save_pretrained(tmp_path)
    assemble = checkpoint._assemble_model

    def fail(*arguments: Any, unread: bool) -> Any:
        if unread:
            raise RuntimeError("weights were changed")
        return assemble(*arguments, unread=unread)

    monkeypatch.setattr(checkpoint, "_assemble_model", fail)
    for name, rule in (("h.0.attn.bias", None), ("transformer.h.0.attn.masked_bias", "causal mask")):
        edit_tensors(tmp_path, lambda tensors, name=name, rule=rule: tensors | {name: torch.ones(() if rule else 4)})
        if rule is None:  # transformers' list for GPT-2 would ignore it
            with pytest.raises(SourceError, match=rf"does not read {name} \(F32 \[4\]\)"):
                load_unread(tmp_path, "float32")
            edit_tensors(tmp_path, lambda tensors, name=name: {n: t for n, t in tensors.items() if n != name})
        else:
            _, notices, found = load_unread(tmp_path, "float32")
            assert any("weights were changed" in notice for notice in notices)
            assert [tensors.rule for tensors in found.ignored] == [rule]


def test_the_first_layers_ignore_those_that_were_cut_off(tmp_path: Path) -> None:
    write(tmp_path)
    assert {tensors.rule for tensors in used(tmp_path, num_hidden_layers=1).ignored} == {"layer that was cut off"}


def test_a_stored_copy_of_a_tied_table_is_merged_and_another_head_is_used(tmp_path: Path) -> None:
    write(tmp_path, "llama_tied")
    edit_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert used(tmp_path).merged == 1
    edit_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1})
    model, _, found = load_unread(tmp_path, "float32")
    assert found.merged == 0
    head = model.get_output_embeddings().weight.values()  # type: ignore[union-attr]
    assert torch.equal(head, load_file(tmp_path / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_whose_scales_nobody_stated_are_named(dtype: torch.dtype, tmp_path: Path) -> None:
    name = f"{LAYER}.q_proj.weight"
    write(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors | {name: tensors[name].to(dtype)})
    with pytest.raises(SourceError, match=rf"stores {name} as .*states no scales"):
        load_unread(tmp_path, "float32")


def test_modelopts_own_file_states_the_quantisation(tmp_path: Path) -> None:
    layers = write_quantised(tmp_path, "modelopt")
    edit_json(tmp_path / "config.json", lambda config: config.pop("quantization_config"))
    with pytest.raises(SourceError, match="quantization_config"):
        load_unread(tmp_path, "float32")
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    name = f"{LAYER}.q_proj.weight"
    edit_tensors(tmp_path, lambda tensors: tensors | {f"{LAYER}.q_proj.input_scale": torch.ones(())})
    model, notices, found = load_unread(tmp_path, "float32")
    assert np.array_equal(model.get_parameter(name).values().numpy(), layers[name].weight)  # type: ignore[operator]
    assert found.merged == 2 * len(layers)
    assert any("ignores 1 scales of activations or cache" in notice for notice in notices)
    stated["quantization"]["quant_algo"] = "NVFP4"  # type: ignore[index]
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    with pytest.raises(UnsupportedModelError, match="modelopt"):
        load_unread(tmp_path, "float32")


def test_scales_of_awq_divide_the_activation(tmp_path: Path) -> None:
    model = make_model(Starcoder2Config(**COMMON, sliding_window=None))
    model.config.save_pretrained(tmp_path)
    tensors, generator = dict(model.state_dict()), torch.Generator().manual_seed(0)
    tensors.pop("lm_head.weight")
    for index, layer in enumerate(model.model.layers):
        scales = (torch.rand(48, generator=generator) + 0.5).half()
        packed = round_for_awq((layer.mlp.c_proj.weight * scales).detach().numpy())
        name = f"model.layers.{index}.mlp"
        del tensors[f"{name}.c_proj.weight"]
        tensors |= {f"{name}.c_proj{end}": value for end, value in packed.tensors.items()}
        tensors[f"{name}.act.scales"] = scales
        layer.mlp.c_proj.weight.data = torch.from_numpy(packed.weight) / scales.float()  # the same product
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    settings_ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    edit_json(tmp_path / "config.json", quantization_config=settings_)
    found = load_reference(tmp_path, "float32")
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-4 * float(logits(model).abs().max()))
    assert used(tmp_path).ignored == ()


def test_bits_that_no_setting_states_are_named(tmp_path: Path) -> None:
    write_quantised(tmp_path, "gptq")
    weight = make_model("llama_untied").model.layers[0].mlp.down_proj.weight
    eight = round_for_gptq(weight.detach().numpy(), 8, symmetric=True)
    stem = "model.layers.0.mlp.down_proj"
    edit_tensors(tmp_path, lambda tensors: tensors | {f"{stem}{end}": value for end, value in eight.tensors.items()})
    with pytest.raises(SourceError, match=rf"{stem}.weight has the shape \[32, 96\].*correct the configuration"):
        load_reference(tmp_path, "float32")


@pytest.mark.parametrize("name", ["quantize_config.json", "config.json"])
def test_missing_weights_are_named_with_the_codes_that_are_stored_instead(name: str, tmp_path: Path) -> None:
    """The quantisation is stated in a file that nobody reads, or nowhere."""
    write_quantised(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / name).write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"lack 14 tensors .*56 others are not read \(first: .*quantization_config"):
        load_unread(tmp_path, "float32")


def test_a_shape_that_the_configuration_does_not_give_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    edit_json(tmp_path / "config.json", vocab_size=400)
    for load in (load_unread, load_reference):
        with pytest.raises(SourceError, match=r"lm_head.weight has the shape \[320, 32\].*makes it \[400, 32\]"):
            load(tmp_path, "float32")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rope_parameters": {"rope_type": "magic", "rope_theta": 1e4}}, "does not know .*: 'magic'"),
        ({"hidden_act": "magic"}, r"\(transformers does not know this value of config.json: 'magic'\)"),
        ({"dtype": "auto"}, r"states dtype 'auto', which is no type.*--dtype"),
        ({"dtype": None, "torch_dtype": "auto"}, r"states torch_dtype 'auto', which is no type.*--dtype"),
    ],
)
def test_a_setting_that_transformers_cannot_use_is_named(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path)
    edit_json(tmp_path / "config.json", **wrong)
    with pytest.raises(SourceError, match=words):
        load_unread(tmp_path, "float32")


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "the architecture Qwen2ForCausalLM, but .* LlamaForCausalLM of its"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}, r"\(modeling_own.Own\), which was not run"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "the architecture LlamaForSequenceClassification, but"),
        ({"architectures": ["LLaMAForCausalLM"]}, None),
        ({"architectures": None}, None),
    ],
)
def test_a_class_that_is_not_exported_is_noted(settings_: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    write(tmp_path)
    edit_json(tmp_path / "config.json", **settings_)
    notices = load_unread(tmp_path, "float32")[1]
    assert len(notices) == (words is not None)
    assert words is None or re.search(words, notices[0])


def test_towers_of_a_composite_model_are_ignored_and_the_decoder_is_read(tmp_path: Path) -> None:
    write_composite(tmp_path, "llava")
    found = used(tmp_path)
    names = stored_tensors(tmp_path)
    towers = [name for name in names if "vision_tower" in name or "multi_modal_projector" in name]
    assert {tensors.rule for tensors in found.ignored} == {"not of the text decoder"}
    assert sum(tensors.count for tensors in found.ignored) == len(towers)
    assert found.read == len(names) - len(towers)


def test_stacked_experts_are_merged(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe")
    experts = [name for name in stored_tensors(tmp_path) if ".experts." in name]
    found = used(tmp_path)
    assert (found.merged, found.ignored) == (len(experts), ())


@pytest.mark.slow
def test_the_manifest_records_what_became_of_the_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "llama_untied")
    edit_tensors(tmp_path / "model", lambda tensors: tensors | {"model.rotary_emb.inv_freq": torch.ones(8)})
    export(tmp_path / "model", tmp_path / "out")
    found = load_decoder_manifest(tmp_path / "out").source_tensors
    assert found is not None
    assert found.read == len(stored_tensors(tmp_path / "model")) - 1
    assert [tensors.names for tensors in found.ignored] == ["model.rotary_emb.inv_freq"]


EXTRA = st.sampled_from(
    [
        ("{layer}.self_attn.rotary_emb.inv_freq", (8,), True),
        ("{layer}.self_attn.attn.bias", (1, 1, 4, 4), True),
        ("mtp.{layer}.weight", (4, 4), True),
        ("visual.{layer}.weight", (4, 4), True),
        ("{layer}.self_attn.extra.bias", (4,), False),
        ("{layer}.self_attn.q_proj.weight_scale", (1,), False),
        ("{layer}.self_attn.q_proj.lora_B.weight", (4, 4), False),
        ("{layer}.unknown", (2,), False),
    ]
)


@pytest.mark.slow
@given(
    family=st.sampled_from(["llama_tied", "gpt2", "qwen3_moe", "phi3", "gemma3"]),
    extra=st.lists(st.tuples(EXTRA, st.integers(0, 1)), max_size=3),
    renamed=st.booleans(),
    data=st.data(),
)
@settings(max_examples=25)
def test_every_tensor_of_a_random_checkpoint_is_accounted_for_or_named(
    tmp_path_factory: pytest.TempPathFactory, family: str, extra: list[Any], renamed: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("random")
    added = {form.format(layer=f"model.layers.{layer}"): (shape, fine) for (form, shape, fine), layer in extra}
    write(
        folder,
        family,
        **{
            name: torch.ones(shape).tril() if len(shape) > 1 else torch.ones(shape)
            for name, (shape, _) in added.items()
        },
    )
    stale = ""
    if renamed:  # under its old name, a tensor is missing; beside it, a copy that nobody reads
        stale = data.draw(st.sampled_from(sorted(set(load_file(folder / "model.safetensors")) - set(added)))) + "_old"
        edit_tensors(folder, lambda tensors: tensors | {stale: tensors[stale.removesuffix("_old")].clone()})
    refused = sorted([name for name, (_, fine) in added.items() if not fine] + [stale] * renamed)
    if refused:
        with pytest.raises(SourceError) as error:
            load_unread(folder, "float32")
        assert f"does not read {refused[0]} " in str(error.value)
        return
    found = used(folder)
    ignored = sum(tensors.count for tensors in found.ignored)
    assert ignored == len(added)
    assert found.read + found.merged + ignored == len(stored_tensors(folder))


SETTINGS: dict[str, list[Any]] = {
    "num_hidden_layers": [1, 3],
    "num_attention_heads": [2, 3],
    "num_key_value_heads": [1, 4],
    "head_dim": [4],
    "hidden_act": ["gelu", "no such function"],
    "rms_norm_eps": [1e-2, "small"],
    "rope_parameters": [{"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}, {"rope_type": "none of these"}],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True],
    "vocab_size": [300],
    "intermediate_size": [64],
    "model_type": ["mistral", "gpt2"],
    "transformers_weights": ["other.safetensors"],
}
ALTERATIONS: dict[str, Any] = {
    "drop": lambda name: lambda tensors: {each: value for each, value in tensors.items() if each != name},
    "rename": lambda name: lambda tensors: {each + "_" * (each == name): value for each, value in tensors.items()},
    "cut": lambda name: lambda tensors: tensors | {name: tensors[name][:-1]},
    "shift": lambda name: lambda tensors: tensors | {name: tensors[name] + 1},
}


@pytest.mark.slow
@given(
    family=st.sampled_from(["llama_tied", "llama_untied", "qwen3_moe", "phi3"]),
    change_=st.one_of(
        st.tuples(st.sampled_from(sorted(ALTERATIONS)), st.integers(0, 99)),
        st.sampled_from([(name, value) for name, values in SETTINGS.items() for value in values]),
    ),
)
@settings(max_examples=40)
def test_a_changed_checkpoint_is_read_as_by_transformers_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, family: str, change_: tuple[str, Any]
) -> None:
    folder = write(tmp_path_factory.mktemp("changed"), family)
    names, (what, value) = sorted(stored_tensors(folder)), change_
    if what in ALTERATIONS:
        name = names[value % len(names)]
        edit_tensors(folder, ALTERATIONS[what](name))
        named = {name, name.partition(".experts.")[0] + ".experts.", *(["lm_head.weight"] * ("embed" in name))}
    else:
        edit_json(folder / "config.json", **{what: value})
        named = {"config.json", *names, "_proj.bias", "lm_head.weight"}
    try:
        model, *_ = load_unread(folder, "float32")
    except (SourceError, UnsupportedModelError) as error:
        message = str(error)
    else:
        message = ""
    refused = what in ("drop", "rename", "cut") or (bool(message) and what in SETTINGS)
    assert refused == any(name in message for name in named), message
    if not refused:
        expected, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not loading["missing_keys"]
        with load_during_calls(model):
            torch.testing.assert_close(logits(model), logits(expected.eval()))
