"""Chat templates like published ones, and messages for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@dataclass(frozen=True)
class Form:
    """A chat template.

    family: the family that it is detected as.
    end: text that ends an answer.
    most: maximum calls per message.
    reasons: whether a message with calls may also have reasoning.
    speaks: whether a message with calls may also have content.
    """

    name: str
    family: str
    end: str
    most: int = 3
    reasons: bool = False
    speaks: bool = True

    @property
    def source(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")


FORMS = [
    Form("hermes", "hermes", "<|im_end|>\n", reasons=True),
    Form("qwen_tags", "hermes", "<|im_end|>\n"),
    Form("llama", "llama", "<|eot_id|>", most=1, speaks=False),
    Form("mistral_list", "mistral", "</s>"),
    Form("mistral_args", "mistral", "</s>", reasons=True),
    Form("functiongemma", "gemma", "<end_of_turn>\n"),
    Form("gemma4", "gemma", "<turn|>\n", reasons=True),
    Form("harmony", "harmony", "<|call|>", most=1, reasons=True),
    Form("deepseek_v3", "deepseek", "<｜end▁of▁sentence｜>"),
    Form("deepseek_v31", "deepseek", "<｜end▁of▁sentence｜>", reasons=True),
    Form("lfm2", "pythonic", "<|im_end|>\n"),
]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a “city”.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
]
USER = {"role": "user", "content": "What is the weather in Zürich? 😀"}
