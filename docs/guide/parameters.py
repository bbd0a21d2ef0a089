"""Writes the list of parameters in docs/guide/runtime.md, from `topw_deploy.runtime.parameters`.

python docs/guide/parameters.py        (a test fails while the page and the parameters differ)
"""

from __future__ import annotations

from pathlib import Path

from topw_deploy.runtime.parameters import ALIASES, PARAMETERS, Parameter

PAGE = Path(__file__).with_name("runtime.md")
HEAD = "Parameters, with the default in brackets:\n\n"
_SECTIONS = {
    "geom_unit": "#variants-of-top-w",
    "lam": "../contract/graph.md#1-parameters",
    "logit_bias": "#order-of-operations",
    "logprobs": "#log-probabilities",
    "preset": "../lab/results.md#the-preset-lively",
    "rule": "#sampling-rules",
    "seed": "../contract/random.md",
    "speculate": "#speculation",
    "stopping_criteria": "#streamers-and-stopping-criteria",
    "streamer": "#streamers-and-stopping-criteria",
    "structured_outputs": "#structured-output",
}
"""Parameter -> the place that tells more."""


def table() -> str:
    """The parameters as a list in Markdown."""
    return HEAD + "".join(_row(name, parameter) for name, parameter in PARAMETERS.items())


def page(old: str) -> str:
    """The page with the list in place of its old one."""
    before, _, rest = old.partition(HEAD)
    lines = rest.split("\n")
    rows = next(place for place, line in enumerate(lines) if not line.startswith("- "))
    return before + table() + "\n".join(lines[rows:])


def _row(name: str, parameter: Parameter) -> str:
    aliases = "".join(f", `{alias}`" for alias, ours in ALIASES.items() if ours == name)
    shown = f"[`{name}`]({_SECTIONS[name]})" if name in _SECTIONS else f"`{name}`"
    default = "" if parameter.default in (None, (), {}) else f" [`{parameter.default}`]"
    choices = f" One of {', '.join(f'`{each}`' for each in parameter.choices)}." if name != "rule" else ""
    return f"- {shown}{aliases}: {parameter.text}{choices if parameter.choices else ''}{default}\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
