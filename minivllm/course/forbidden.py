"""What an answer may not use: found in its syntax tree, before it runs.

Owns the rules against short cuts: the library function that a task asks for, the reference itself,
doors out of the language (exec, sys.modules), and changes to other modules. It stops mistakes and
casual cheating; `lessons/INSTRUCTORS.md` says what to do about more.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from minivllm.course.source import GIVEN, Definition, read_import
from minivllm.course.table import Chapter

# Enough for every unit of the course; a chapter adds its own in course.toml (`imports`).
ALLOWED_MODULES = frozenset(
    {"__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "heapq"}
    | {"itertools", "math", "numpy", "operator", "torch", "typing"}
    # To look around with; what files and systems they know is behind FORBIDDEN_ATTRIBUTES.
    | {"cmath", "contextlib", "copy", "decimal", "fractions", "numbers", "pprint", "random", "re"}
    | {"statistics", "string", "textwrap", "time", "warnings"}
)
FORBIDDEN_NAMES = frozenset(
    {"eval", "exec", "compile", "open", "globals", "__import__", "__builtins__"}
)
# Where torch keeps its functions under other names: no list of them would ever be complete.
FORBIDDEN_MODULES = frozenset({"torch.ops", "torch._C"})
# Attributes of anything: ways to reach a module or another function's insides.
FORBIDDEN_ATTRIBUTES = frozenset(
    {"sys", "os", "importlib", "builtins", "subprocess", "inspect", "_exit"}
    | {"_sys", "_os", "_io", "bltns"}  # as collections, random, pprint and enum call them
    | {"__globals__", "__builtins__", "__subclasses__", "__code__", "__closure__", "__import__"}
    | {"__loader__", "__spec__", "f_globals", "f_back", "gi_frame", "tb_frame"}
)


@dataclass(frozen=True)
class Violation:
    """One use of something forbidden."""

    line: int
    text: str
    tasks: tuple[str, ...]  # those that lose their points by it
    fatal: bool = False  # a rule for the whole file, which is then not run


def find_violations(tree: ast.Module, chapter: Chapter) -> tuple[Violation, ...]:
    """Every violation in an exercise file, in line order."""
    scan = _Scan(tree, chapter)
    return tuple(sorted(scan.violations(), key=lambda v: v.line))


def allowed_import(module: str, chapter: Chapter) -> bool:
    """Whether an exercise of this chapter may import `module`."""
    top = module.partition(".")[0]
    return module in (GIVEN, "minivllm.course") or top in ALLOWED_MODULES | {*chapter.imports}


class _Scan:
    def __init__(self, tree: ast.Module, chapter: Chapter) -> None:
        self.tree = tree
        self.chapter = chapter
        # What each imported name stands for: {"F": "torch.nn.functional"}.
        self.aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            for entry in read_import(node):
                origin = f"{entry.module}.{entry.name}" if entry.name else entry.module
                plain = not entry.name and not entry.alias
                self.aliases[entry.bound] = entry.bound if plain else origin
        self.spans = list(self._unit_spans())

    def _unit_spans(self) -> Iterator[tuple[int, int, str]]:
        """First and last line of each unit's definition, and its task."""
        for task in self.chapter.tasks:
            for unit in task.units:
                body: list[ast.stmt] = self.tree.body
                node = None
                for part in unit.split("."):
                    node = next(
                        (n for n in body if isinstance(n, Definition) and n.name == part), None
                    )
                    body = node.body if node is not None else []
                if node is not None:
                    yield node.lineno, node.end_lineno or node.lineno, task.id

    def _tasks_at(self, line: int) -> tuple[str, ...]:
        """The unit's task inside a unit; every task of the file elsewhere (helpers serve all)."""
        inside = tuple(task for start, end, task in self.spans if start <= line <= end)
        return inside or tuple(task.id for task in self.chapter.tasks)

    def violations(self) -> Iterator[Violation]:
        for node in ast.walk(self.tree):
            line = getattr(node, "lineno", 0)
            for text in self._generic(node):
                yield Violation(line, text, tuple(t.id for t in self.chapter.tasks), fatal=True)
            used = self._names(node)
            for task in self.chapter.tasks:
                if task.id in self._tasks_at(line):
                    for name in used & set(task.forbidden):
                        # `.multinomial` of anything: say what it is here, `torch.multinomial`.
                        plain = [n for n in used if n.endswith(name) and n[0] not in ".?"]
                        shown = min(plain, default=name.lstrip("."))
                        text = f"not allowed here: {shown} would do this task's work"
                        yield Violation(line, text, (task.id,))

    def _names(self, node: ast.AST) -> set[str]:
        """Dotted names that `node` refers to; `.name` for an attribute of anything."""
        found = {f"{e.module}.{e.name}" for e in read_import(node) if e.name}
        if isinstance(node, ast.Attribute):
            found |= {self._dotted(node), f".{node.attr}"}
        elif isinstance(node, ast.Name):
            found.add(self.aliases.get(node.id, node.id))
        elif _is_call(node, "getattr") and isinstance(node, ast.Call) and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found |= {f"{self._dotted(node.args[0])}.{name.value}", f".{name.value}"}
        return found

    def _dotted(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}"
        return self.aliases.get(node.id, node.id) if isinstance(node, ast.Name) else "?"

    def _generic(self, node: ast.AST) -> Iterator[str]:
        """Rules that hold for every task."""
        yield from self._imports(node)
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            yield f"{node.id} is not for exercises"
        # `from torch import os` is the attribute, too.
        attributes = {entry.name for entry in read_import(node)} | {getattr(node, "attr", "")}
        for name in attributes & FORBIDDEN_ATTRIBUTES:
            yield f"the attribute {name} is not for exercises"
        for module in self._names(node) & FORBIDDEN_MODULES:
            yield f"{module} is not for exercises"
        # torch.allclose = ... would change the tests' own tools, not the answer.
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if self._dotted(node).partition(".")[0] in self._module_roots():
                yield f"it changes {self._dotted(node)}"
        for name in ("setattr", "delattr", "getattr"):
            if not (_is_call(node, name) and isinstance(node, ast.Call) and node.args):
                continue
            if self._dotted(node.args[0]).partition(".")[0] in self._module_roots():
                constant = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
                if name != "getattr" or not constant:
                    yield f"{name} on an imported module"

    def _imports(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield "a relative import: an exercise is a file of its own"
        for entry in read_import(node):
            if not allowed_import(entry.module, self.chapter):
                yield f"it imports {entry.module}"
            elif entry.module == "minivllm.course" and entry.name != "given":
                yield f"of minivllm.course only `given` may be imported, not {entry.name or 'all'}"
            elif entry.module == GIVEN and not entry.name:
                yield "write `from minivllm.course.given import ...`"

    def _module_roots(self) -> set[str]:
        return {origin.partition(".")[0] for origin in self.aliases.values()}


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
