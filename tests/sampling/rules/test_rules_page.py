"""docs/contract/rules.md has a section for every rule; section and module lead to each other."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

from topw_deploy.sampling.rules import RULES, TOP_W

PAGE = Path(__file__).parents[3] / "docs" / "contract" / "rules.md"
OTHERS = [rule for rule in RULES.values() if rule is not TOP_W]


def sections() -> dict[str, str]:
    """The page's sections: heading -> text."""
    parts = re.split(r"^### (.+)\n", PAGE.read_text("utf-8").partition("\n## 4. ")[2], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_has_a_section_for_every_rule_and_no_other() -> None:
    assert {name.replace("-", "_") for name in sections()} == {rule.name for rule in OTHERS}


@pytest.mark.parametrize("rule", OTHERS, ids=lambda rule: rule.name)
def test_a_rule_s_section_and_its_module_name_each_other(rule) -> None:
    name = rule.name.replace("_", "-")
    module = sys.modules[rule.choose.__module__]
    (linked,) = re.findall(r"^Code: \[`\w+\.py`\]\((.+)\)\.$", sections()[name], re.MULTILINE)
    assert (PAGE.parent / linked).resolve() == Path(inspect.getfile(module)).resolve()
    assert re.search(rf"rules\.md#{name}\b(?!-)", module.__doc__ or "")
