"""The imports of both packages, from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import topw_deploy
import topw_lab

ROOTS = tuple(Path(str(package.__file__)).parent for package in (topw_deploy, topw_lab))
PACKAGES = {root.name for root in ROOTS}


@dataclass(frozen=True)
class Import:
    """One import in a file.

    name: the module that defines the imported name.
    when: "load" (at import), "types" (type checkers only) or "call" (in a function).
    """

    name: str
    when: str


def name_of(root: Path, path: Path) -> str:
    """`topw_deploy.export.pipeline`; `__init__` has the package's name."""
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(root, path): path for root in ROOTS for path in sorted(root.rglob("*.py"))}


@cache
def imports(module: str) -> tuple[Import, ...]:
    """Every import of `module`, each once."""
    return tuple(dict.fromkeys(_found(_tree(module), module, "load")))


def loaded_by(module: str) -> set[str]:
    """All modules loaded with `module`: transitive imports and their packages."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            waiting += [found.name for found in imports(name) if found.when == "load"]
            waiting += [name.rpartition(".")[0]] if "." in name else []
    return seen - {module}


def cycle() -> list[str]:
    """A cycle of imports, those for types and in functions included, in order; else []."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for found in imports(module):
            if found.name in MODULES and not _is_inside(found.name, module):
                circle = visit(found.name, [*path, module])
                if circle:
                    return circle
        done.add(module)
        return []

    return next((circle for module in MODULES if (circle := visit(module, []))), [])


def room_of(module: str) -> str:
    """The folder of `module`, such as `export/sampler`; top-level modules are rooms."""
    root = next(root for root in ROOTS if root in MODULES[module].parents)
    path = MODULES[module].relative_to(root)
    return path.parent.as_posix() if len(path.parts) > 1 else path.stem


def defining(base: str, name: str) -> str:
    """The module that defines what `from base import name` imports; `base` if that is not known."""
    if f"{base}.{name}" in MODULES:
        return f"{base}.{name}"
    if base in MODULES and MODULES[base].name == "__init__.py":
        return _exports(base).get(name, base)
    return base


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def _exports(package: str) -> dict[str, str]:
    return {
        alias.asname or alias.name: defining(node.module, alias.name)
        for node in _tree(package).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _found(node: ast.AST, module: str, when: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, when) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module} imports relatively: write the full name"
        base = node.module or ""
        for alias in node.names:
            yield Import(defining(base, alias.name), when)
        if base in MODULES:
            yield Import(base, when)  # importing from a package runs its __init__
    elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        for child in node.body:
            yield from _found(child, module, "types")
    else:
        in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from _found(child, module, "call" if in_function else when)


def _is_inside(module: str, package: str) -> bool:
    """A package's `__init__` listing its modules is no cycle."""
    return module == package or (module.startswith(f"{package}.") and MODULES[package].name == "__init__.py")
