"""The demo model's text: Python's own documentation.

In order: reference topics (`pydoc_data.topics`), docstrings of built-in modules, docstrings of the standard library,
parsed with `ast`. Deterministic for each Python release.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Folders left out: tests, internals of applications, generated tables, installed packages.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "config-3",
        "encodings",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
    }
)
# Built-in modules: importable on every platform without running their code.
CORE_MODULES = ("builtins", "_functools", "_io", "gc", "itertools", "sys", "time")
SHORTEST_DOCUMENT = 60  # characters
LONGEST_SIGNATURE = 400  # characters; longer ones are mostly tables
LONG_PARAGRAPH = 80  # characters; documents sharing one are copies
HELD_OUT_PERCENT = 5

_HEADING = re.compile(r"^(?P<title>\S[^\n]*)\n(?P<rule>([*=\-^~\"])\3{2,})[ ]*$", re.MULTILINE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order; the parts share no long paragraph."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all documents."""
        total = hashlib.sha256()
        for document in (*self.train, *self.held_out):
            total.update(hashlib.sha256(document.encode()).digest())
        return total.hexdigest()


def gather_corpus() -> Corpus:
    """The documentation, cleaned, deduplicated and split into training and held-out documents."""
    return split([*topic_sections(), *core_docstrings(), *library_docstrings()])


def split(documents: Iterable[str]) -> Corpus:
    """Drop short documents and exact copies; hold out some documents, chosen by hash.

    A held-out document shares no long paragraph with another one. Topics overlap and modules copy docstrings; a copy in
    the training text would invalidate the held-out loss.
    """
    kept = [d for d in dict.fromkeys(documents) if len(d) >= SHORTEST_DOCUMENT]
    uses = Counter(paragraph for document in kept for paragraph in set(long_paragraphs(document)))
    held_out = [d for d in kept if is_chosen(d) and all(uses[p] == 1 for p in long_paragraphs(d))]
    chosen = set(held_out)
    return Corpus(train=tuple(d for d in kept if d not in chosen), held_out=tuple(held_out))


def is_chosen(document: str) -> bool:
    """Whether the document is held out: its hash falls into the first HELD_OUT_PERCENT of 100 slots."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def topic_sections() -> Iterator[str]:
    """pydoc's language reference, one document per section."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield from split_sections(_clean(topics[name]))


def split_sections(text: str) -> Iterator[str]:
    """Split before underlined headings; normalise the underlines."""
    headings = list(_HEADING.finditer(text))
    starts = [heading.start() for heading in headings]
    if not starts or starts[0] > 0:
        yield text[: starts[0] if starts else len(text)].strip()
    for heading, end in zip(headings, [*starts[1:], len(text)], strict=True):
        title, body = heading["title"].strip(), text[heading.end() : end].strip()
        yield f"{title}\n{'=' * len(title)}\n\n{body}" if body else ""


def core_docstrings() -> Iterator[str]:
    """The docstrings of CORE_MODULES, each module as a Python stub."""
    for module in CORE_MODULES:
        for name, value in sorted(vars(importlib.import_module(module)).items()):
            if inspect.isclass(value) and value.__name__ == name:
                methods = [(n, m) for n, m in sorted(vars(value).items()) if not n.startswith("_")]
                members = [_stub(f"def {n}", m, "    ") for n, m in methods if inspect.isroutine(m)]
                yield "\n\n".join(filter(None, [_stub(f"class {name}", value, ""), *members]))
            elif inspect.isbuiltin(value) and not name.endswith("hook"):  # programs replace hooks
                yield _stub(f"def {name}", value, "")


def _stub(opening: str, value: Any, indent: str) -> str:
    doc = value.__doc__
    if not doc:
        return ""
    signature = getattr(value, "__text_signature__", None)
    if signature:
        # CPython marks the bound argument with $; a function's is its module, which callers omit.
        signature = re.sub(r"\$module(, /)?(, )?", "", signature).replace("$", "")
    elif not opening.startswith("class"):
        signature = "(...)"
    return f"{indent}{opening}{signature or ''}:\n{_quoted(_clean(inspect.cleandoc(doc)), indent + '    ')}"


def library_docstrings(root: Path | None = None) -> Iterator[str]:
    """Docstrings of all .py files under `root` (default: the standard library)."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if any(part in SKIPPED_FOLDERS or part.startswith("config-") for part in parts[:-1]):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # templates and fixtures
        yield from _module_documents(tree, ".".join(parts).removesuffix(".py").removesuffix(".__init__"))


def _module_documents(tree: ast.Module, name: str) -> Iterator[str]:
    doc = ast.get_docstring(tree)
    if doc:
        yield f"{name}\n{'=' * len(name)}\n\n{_clean(doc)}"
    for node in tree.body:
        if isinstance(node, _Definition):
            yield _definition(node, "")


def _definition(node: _Definition, indent: str) -> str:
    """A class or function with its docstring; "" if it has none."""
    doc = ast.get_docstring(node)
    inner = indent + "    "
    members = []
    if isinstance(node, ast.ClassDef):
        opening = f"class {node.name}" + (f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else "")
        members = [_definition(member, inner) for member in node.body if isinstance(member, _Definition)]
    else:
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        opening = f"{keyword} {node.name}({ast.unparse(node.args)}){returns}"
    members = [member for member in members if member]
    if (not doc and not members) or len(opening) > LONGEST_SIGNATURE:
        return ""
    head = f"{indent}{opening}:" + (f"\n{_quoted(_clean(doc), inner)}" if doc else "")
    return "\n\n".join([head, *members])


def _quoted(doc: str, indent: str) -> str:
    closing = '\n"""' if "\n" in doc else '"""'
    return textwrap.indent(f'"""{doc}{closing}', indent)


def _clean(text: str) -> str:
    text = _CONTROL.sub("", text.expandtabs().replace("\r\n", "\n"))
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def long_paragraphs(document: str) -> Iterator[str]:
    """Paragraphs of at least LONG_PARAGRAPH characters, with whitespace folded as copies may be indented."""
    for paragraph in document.split("\n\n"):
        folded = " ".join(paragraph.split())
        if len(folded) >= LONG_PARAGRAPH:
            yield folded
