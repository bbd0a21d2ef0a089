"""Writes docs/guide/commands.md: the help of every command, as click prints it, without repetitions.

python docs/guide/commands.py        (a test fails while the page and the commands differ)

If at least FEWEST options of a command are those of an earlier one, the page only names them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from topw_deploy.cli.main import COMMANDS, topw

PAGE = Path(__file__).with_name("commands.md")
FEWEST = 3
WIDTH = 88
Said = dict[tuple[str, str], str]
"""(an option's names, its help) -> the first command that has it"""
_HEAD = """# Commands

Written by `python docs/guide/commands.py` from the commands' own help; options that an earlier command has, too, are
only named, and `--help` is left out. `topw-export` is `topw export`. Options may be spelled with underscores
(`--max_new_tokens`). Results go to stdout, progress and notes to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage or
a wrong value of an option, 130 interrupted.

Characters that control a terminal (`\\x1b`, `\\u202e`) are escaped in printed names of models, files and arguments,
also in JSON, which parses to the original names. `topw generate` writes text to files and pipes exactly as the model
generated it; on a terminal it escapes these characters, except line feeds and tabs. A closed stdout is an error before
any work: use `/dev/null`.

Shells complete commands and options after `eval "$(_TOPW_COMPLETE=bash_source topw)"` (`zsh_source`; for fish,
`_TOPW_COMPLETE=fish_source topw | source`) in their start file, and for `topw-export` with `_TOPW_EXPORT_COMPLETE`.
"""


def helps() -> Iterator[tuple[str, str]]:
    """The name of every command, and its help. A group's commands follow it."""
    root = click.Context(topw, info_name="topw", **_settings())
    said: Said = {}
    for name in COMMANDS:
        command = topw.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root, **_settings())
        yield name, _help(name, command, context, said)
        if isinstance(command, click.Group):
            for inner, below in command.commands.items():
                inner_context = click.Context(below, info_name=inner, parent=context, **_settings())
                yield f"{name} {inner}", _help(f"{name} {inner}", below, inner_context, said)


def _help(name: str, command: click.Command, context: click.Context, said: Said) -> str:
    """What `topw NAME --help` prints, WIDTH columns wide, without options that are `said`; adds its own to them."""
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    repeated: dict[str, list[click.Option]] = {}
    for option in options:
        record = option.get_help_record(context)
        if record is not None and said.setdefault(record, name) != name:
            repeated.setdefault(said[record], []).append(option)
    repeated = {source: found for source, found in repeated.items() if len(found) >= FEWEST}
    left_out = [option for found in repeated.values() for option in found]
    for option in left_out:
        option.hidden = True
    text = command.get_help(context)
    for option in left_out:
        option.hidden = False
    for source, found in repeated.items():
        names = ", ".join(next(name for name in option.opts if name.startswith("--")) for option in found)
        text += "\n\n" + textwrap.fill(
            f"Options as in `topw {source}`: {names}.",
            WIDTH,
            initial_indent="  ",
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return text


def page() -> str:
    return _HEAD + "".join(f"\n## topw {name}\n\n```text\n{text}\n```\n" for name, text in helps())


def _settings() -> dict[str, object]:
    return {"terminal_width": WIDTH, "max_content_width": WIDTH, "help_option_names": [], "show_default": True}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
