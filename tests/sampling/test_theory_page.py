"""docs/contract/theory.md names a test for every statement and theorem."""

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "contract" / "theory.md"


def named_on_the_page():
    """Patterns of test names in backticks; three dots stand for omitted words."""
    names = re.findall(r"`((?:test_|\.\.\.)\w+(?:\.\.\.)?)`", PAGE.read_text())
    return [re.compile(name.replace("...", ".*")) for name in names]


def defined_in(pattern):
    return [
        name for path in HERE.glob(pattern) for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    ]


def test_every_test_named_on_the_theory_page_exists():
    defined = defined_in("test_*.py")
    named = named_on_the_page()
    assert len(named) > 30
    missing = [name.pattern for name in named if not any(name.fullmatch(test) for test in defined)]
    assert missing == []


def test_every_theorem_test_is_named_on_the_theory_page():
    named = named_on_the_page()
    for test in defined_in("test_shortcuts.py") + defined_in("test_wasserstein.py"):
        assert any(name.fullmatch(test) for name in named), test
