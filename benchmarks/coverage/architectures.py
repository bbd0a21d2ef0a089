"""Model types of transformers' causal-LM map: decoder-only language models and the others."""

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

BROKEN: dict[str, str] = {}
"""Decoder-only model type -> error of its configuration or code in this transformers."""


def all_types() -> dict[str, str]:
    """Model type -> class name, as in transformers' causal-LM map."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def decoder_only() -> list[str]:
    """Sorted model types of decoder-only language models, those in BROKEN included."""
    return sorted(set(all_types()) - NOT_DECODER_ONLY.keys())
