"""Links, paths, modules, `make` targets and commands in documents exist."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest

from topw_deploy.cli.main import COMMANDS, topw

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "src").rglob("*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TARGET = re.compile(r"\bmake (?:-j\d+ )?([a-z][a-z0-9-]*)")
CODE = re.compile(r"`([^`\n]+)`")
PLACES = ("src", "tests", "docs", "benchmarks", "fuzz", "examples", "src/topw_deploy")
pages = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+)$", BLOCK.sub("", text(page)), re.MULTILINE):
        words = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        copies = sum(1 for name in found if re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", name))
        found.add(f"{anchor}-{copies}" if copies else anchor)
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", text(ROOT / "Makefile"), re.MULTILINE))


@pages
def test_every_relative_link_leads_to_a_file_and_to_a_heading_of_it(page: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", text(page))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        aim = (page.parent / name).resolve() if name else page
        assert aim.exists(), f"{link}: there is no {aim.relative_to(ROOT)}"
        if anchor:
            assert anchor in anchors(aim), f"{link}: {sorted(anchors(aim))}"


@pages
def test_every_make_target_exists(page: Path) -> None:
    named = [t for code in (*SHELL.findall(text(page)), *CODE.findall(text(page))) for t in TARGET.findall(code)]
    assert set(named) <= make_targets()


@pages
def test_every_path_in_backticks_exists(page: Path) -> None:
    """Left out: names in capitals, which the user chooses, and `out` and `dist`, which commands write."""
    for code in CODE.findall(BLOCK.sub("", text(page))):
        path = code.split("::")[0]
        if not re.fullmatch(r"[\w.-]+(/[\w.*-]+)+/?|[\w-]+/", path) or re.search(r"[A-Z]{2,}|\*", path):
            continue
        if path.startswith(("out/", "dist/", "owner/", "engines/")):
            continue
        near = [page.parent, ROOT, *(ROOT / place for place in PLACES)]
        assert any((folder / path).exists() for folder in near), f"there is no {path}"


@pages
def test_every_module_and_name_of_the_package_exists(page: Path) -> None:
    for dotted in set(re.findall(r"\btopw_deploy(?:\.[A-Za-z_]\w*)+", text(page))):
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            try:
                found = importlib.util.find_spec(".".join(parts[:length]))
            except ModuleNotFoundError:
                continue
            if found is not None:
                break
        assert length >= len(parts) - 1, f"there is no module of {dotted}"
        if length == len(parts) - 1:
            module = importlib.import_module(".".join(parts[:length]))
            assert hasattr(module, parts[-1]), f"there is no {dotted}"


@pages
def test_every_module_that_a_command_runs_exists(page: Path) -> None:
    joined = text(page).replace("\n", " ")
    for module in set(re.findall(r"python3? -m ((?:benchmarks|fuzz|topw_deploy)[\w.]*)", joined)):
        path = ROOT / ("src" if module.startswith("topw_") else ".") / Path(*module.rstrip(".").split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@pages
def test_every_topw_command_exists(page: Path) -> None:
    for line in "".join(SHELL.findall(text(page))).replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["topw"]:
            assert words[1] in COMMANDS or words[1].startswith("-"), line


def topw_lines(page: Path) -> list[list[str]]:
    """The words of every `topw` command on a page, in blocks and in the text."""
    joined = text(page).replace("\\\n", " ")
    blocks = "".join(SHELL.findall(joined)).splitlines()
    inline = [code.replace("\n", " ") for code in re.findall(r"`(topw[ -][^`]+)`", BLOCK.sub("", joined))]
    found = [shlex.split(line, comments=True) for line in (*blocks, *inline) if line.startswith("topw")]
    return [["topw", "export", *words[1:]] if words[0] == "topw-export" else words for words in found if words]


def options(words: list[str]) -> set[str] | None:
    """The options of the command that `words` begin with; None if it passes unknown ones on."""
    context = click.Context(topw)
    command = topw.get_command(context, words[1]) if len(words) > 1 else topw
    if isinstance(command, click.Group) and len(words) > 2:
        command = command.get_command(context, words[2])
    if command is None or isinstance(command, click.Group) or command.context_settings.get("ignore_unknown_options"):
        return None
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}


@pages
def test_every_option_of_a_topw_command_exists(page: Path) -> None:
    for words in topw_lines(page):
        known = options(words)
        given = {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert known is None or given <= known, f"{' '.join(words)}: unknown {sorted(given - known)}"


def test_an_option_that_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Use `topw serve out --max-rows 3` or\n\n```sh\ntopw-export tiny out --dtipe int4\n```\n")
    with pytest.raises(AssertionError, match="--dtipe"):
        test_every_option_of_a_topw_command_exists(page)
    page.write_text("Use `topw serve out\n--max-rows 3`.\n")
    with pytest.raises(AssertionError, match="--max-rows"):
        test_every_option_of_a_topw_command_exists(page)


def test_the_readme_begins_with_the_commands_that_ci_runs() -> None:
    commands = [c for c in "".join(SHELL.findall(text(ROOT / "README.md"))).splitlines() if c.startswith("make ")]
    assert [c.split("#")[0].strip() for c in commands[:2]] == ["make demo", "make test"]
    assert "make test" in text(ROOT / ".ci" / "run")


def test_the_pages_agree_on_the_size_of_an_installation() -> None:
    (total,) = re.findall(r"takes (\d+ MB) on disk", text(ROOT / "docs" / "guide" / "install.md"))
    assert total in text(ROOT / "README.md")
