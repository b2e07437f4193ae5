"""A module of the package as text: its functions, classes and imports, comments kept.

Owns the reading of source by `ast` and line numbers. Never imports the module it reads, so cutting
stubs needs no torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

GIVEN = "minivllm.course.given"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, order=True)
class Import:
    """One name bound by an import; `name` is "" for a plain `import module`."""

    module: str
    name: str = ""
    alias: str = ""

    @property
    def bound(self) -> str:
        """The name that code uses: `import a.b` binds `a`."""
        return self.alias or self.name or self.module.partition(".")[0]


class Source:
    """The parsed text of one module."""

    def __init__(self, module: str) -> None:
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f"course.toml names the source {module!r}, which does not exist")
        self.module = module
        self.path = Path(spec.origin)
        self.text = self.path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """Top-level functions, classes and assignments by name."""
        found: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            if isinstance(node, Definition):
                found[node.name] = node
            elif isinstance(node, ast.Assign):
                found.update({t.id: node for t in node.targets if isinstance(t, ast.Name)})
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = node
        return found

    @cached_property
    def imports(self) -> dict[str, Import]:
        """What each imported name is, TYPE_CHECKING blocks included (annotations use those)."""
        found = [entry for node in ast.walk(self.tree) for entry in read_import(node)]
        return {entry.bound: entry for entry in found if entry.module != "__future__"}

    def find(self, dotted: str) -> Definition:
        """The function, class or `Class.method` called `dotted`."""
        body: Iterable[ast.stmt] = self.tree.body
        node: ast.stmt | None = None
        for part in dotted.split("."):
            node = next((n for n in body if isinstance(n, Definition) and n.name == part), None)
            if node is None:
                raise ValueError(f"{self.module} defines no {dotted!r} (named in course.toml)")
            body = node.body
        assert isinstance(node, Definition)
        return node

    def start(self, node: ast.stmt) -> int:
        """Index of the first line that belongs to `node`: decorators and comments right above."""
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorators)]) - 1
        indent = " " * node.col_offset
        while first > 0 and self.lines[first - 1].startswith(f"{indent}#"):
            first -= 1
        return first

    def cut(self, node: ast.stmt) -> list[str]:
        """The lines of `node` as they stand in the file."""
        return self.lines[self.start(node) : node.end_lineno]

    def signature(self, node: Definition) -> list[str]:
        """The lines from the first decorator to the colon before the body."""
        first = self.start(node)
        # The body's first statement may follow a comment, which is part of the answer.
        end = node.body[0].lineno - 1
        while not self.lines[end - 1].rstrip().endswith(":"):
            end -= 1
        return self.lines[first:end]


def names_used(node: ast.AST) -> set[str]:
    """Every plain name that the code of `node` reads or writes."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def read_import(node: ast.AST) -> list[Import]:
    """The names that an import statement binds; empty for any other node."""
    if isinstance(node, ast.Import):
        return [Import(a.name, "", a.asname or "") for a in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [Import(node.module, a.name, a.asname or "") for a in node.names]
    return []


def render_imports(imports: Iterable[Import]) -> list[str]:
    """Import lines in isort's order; a name of the package comes from the given module instead."""
    groups: dict[int, list[Import]] = {0: [], 1: [], 2: []}
    by_name: dict[str, Import] = {}
    for entry in sorted(set(imports)):
        if by_name.setdefault(entry.bound, entry) != entry and entry.name:
            raise ValueError(
                f"{entry.bound} comes from {by_name[entry.bound].module} and {entry.module}: "
                "one file cannot have both, import one under another name in its source"
            )
        top = entry.module.partition(".")[0]
        if top == "minivllm":
            if entry.module != "minivllm.course":
                entry = Import(GIVEN, entry.name, entry.alias)
            groups[2].append(entry)
        else:
            groups[0 if top in sys.stdlib_module_names else 1].append(entry)
    lines = ["from __future__ import annotations"]
    for group in groups.values():
        lines += ["", *_render_group(group)] if group else []
    return lines


def _render_group(group: list[Import]) -> list[str]:
    lines = []
    for entry in sorted(e for e in group if not e.name):
        lines.append(f"import {entry.module}" + (f" as {entry.alias}" if entry.alias else ""))
    for module in sorted({e.module for e in group if e.name}):
        names = sorted(
            (f"{e.name} as {e.alias}" if e.alias else e.name)
            for e in set(group)
            if e.module == module and e.name
        )
        line = f"from {module} import {', '.join(names)}"
        if len(line) > 100:
            line = "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
        lines += line.splitlines()
    return lines
