"""The model types of transformers' causal-LM map, sorted into decoder-only language models and others."""

from __future__ import annotations

ENCODER_DECODER = "decoder half of an encoder-decoder, which attends to an encoder's output"
ENCODER = "bidirectional encoder with a language-model head"
MUSIC = "generates audio codebooks from an encoder's output"
DRAFT = "draft model, which reads another model's hidden states and cache"

NOT_DECODER_ONLY = {
    **dict.fromkeys(
        (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "mvp",
            "pegasus",
            "plbart",
            "prophetnet",
            "trocr",
            "whisper",
        ),
        ENCODER_DECODER,
    ),
    "bert-generation": "BERT as one half of an encoder-decoder",
    **dict.fromkeys(
        (
            "bert",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        ENCODER,
    ),
    "xlnet": "permutation language model, which attends to both sides",
    **dict.fromkeys(("musicgen", "musicgen_melody"), MUSIC),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), DRAFT),
}
"""Model type -> why it is not a decoder-only language model."""

_TRIED = """
afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam biogpt bitnet bloom blt codegen cohere cohere2
cohere2_moe cohere_compass_text cpmant ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama
doge dots1 dots3_note dots3_note_text emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1
falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text
gemma4_unified gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2
gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe
lfm3 llama llama4 llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m2
minimax_m3_vl_text ministral ministral3 mistral mixtral mllama modernbert-decoder moshi moss_transcribe_diarize
mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3
phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe
qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma reformer rwkv seed_oss smollm3 solar_open stablelm
starcoder2 vaultgemma xglm xlstm youtu zamba zamba2 zaya
"""
DECODER_ONLY = frozenset(_TRIED.split())
"""Known decoder-only language models, among them the text decoders of multimodal models."""


def all_types() -> dict[str, str]:
    """Model type -> class name, as in transformers' causal-LM map."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def decoder_only_types() -> list[str]:
    """Sorted decoder-only model types of the installed transformers; unknown types count as decoder-only."""
    return sorted(set(all_types()) - NOT_DECODER_ONLY.keys())


def unlisted_types() -> list[str]:
    """Sorted model types that are in neither table."""
    return sorted(set(all_types()) - NOT_DECODER_ONLY.keys() - DECODER_ONLY)
