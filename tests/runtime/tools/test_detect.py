"""The family of a model's tool calls is detected from its template, or from its tokens."""

from __future__ import annotations

import pytest

from topw_deploy.runtime.tools import FAMILIES, detect


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>{{ name }}\n<arg_key>", None),
        ('<|start_header_id|> Environment: ipython {"name": n, "parameters": p}', "llama"),
        ("<|start_header_id|>{{ role }}", None),
        ("<start_of_turn>model\n", None),
        ("<|im_start|>{{ tools }}", None),
        (None, None),
    ],
)
def test_the_template_names_the_family(template: str | None, family: str | None) -> None:
    assert detect(template) == family


@pytest.mark.parametrize(
    ("tokens", "family"),
    [
        (["[TOOL_CALLS]", "[INST]"], "mistral"),
        (["<|python_tag|>"], "llama"),
        (["<tool_call>", "</tool_call>"], "hermes"),
        (["<tool_call>", "<arg_key>"], None),
        (["<s>"], None),
    ],
)
def test_the_tokens_name_the_family_if_the_template_does_not(tokens: list[str], family: str | None) -> None:
    assert detect(None, tokens) == detect("{{ messages }}", tokens) == family
    assert detect("<start_function_call>", tokens) == "gemma", "the template comes first"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_no_opener_begins_another(family: object) -> None:
    openers = list(family.openers)  # type: ignore[attr-defined]
    assert not [(a, b) for a in openers for b in openers if a != b and b.startswith(a)]
