"""Cuts a chapter's solution and stub out of the package's own source.

Owns the text of both files. The solution is the reference's lines with their comments; the stub has
the same signatures, the contract of course.toml and no body. So neither can drift from the engine.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass

from minivllm.course.source import GIVEN, Import, Source, names_used, render_imports
from minivllm.course.table import Chapter, Course, Task


@dataclass(frozen=True)
class ChapterText:
    """The two generated files of a chapter."""

    stub: str
    solution: str


def cut_chapter(chapter: Chapter, course: Course) -> ChapterText:
    """Generate both files. ValueError if the table and the source disagree."""
    sources = {task.source: Source(task.source) for task in chapter.tasks}
    units = {(t.source, t.name) for t in course.tasks if t.name not in chapter.names}
    return ChapterText(
        stub=_render(chapter, sources, units, _stub_header(chapter), gaps=True),
        solution=_render(chapter, sources, units, _solution_header(chapter), gaps=False),
    )


def _render(
    chapter: Chapter,
    sources: dict[str, Source],
    units: set[tuple[str, str]],
    header: str,
    gaps: bool,
) -> str:
    """`units` are the (module, name) of other chapters: imported from `given`, never copied."""
    imports: set[Import] = set()
    pieces: list[list[str]] = []
    if set(chapter.names) & set(chapter.extends):
        imports.add(Import("minivllm.course", "given"))
    for module, source in sources.items():
        tasks = [task for task in chapter.tasks if task.source == module]
        foreign = {name for origin, name in units if origin == module}
        helpers, used = _dependencies(source, chapter, tasks, foreign)
        imports |= {source.imports[name] for name in used if name in source.imports}
        imports |= {Import(GIVEN, name) for name in used & foreign}
        pieces += [source.cut(node) for node in helpers]
        for name in dict.fromkeys(task.name for task in tasks):
            own = [task for task in tasks if task.name == name]
            pieces.append(_object_text(source, chapter, name, own, gaps))
    lines = [header, "", *render_imports(imports)]
    for piece in pieces:
        # PEP 8: two blank lines round definitions, one between constants.
        first = next(line for line in piece if not line.startswith("#"))
        blank = [""] if first[:1].isupper() and lines[-1] != "" else ["", ""]
        lines += [*blank, *piece]
    return "\n".join(lines) + "\n"


def _object_text(
    source: Source, chapter: Chapter, name: str, tasks: list[Task], gaps: bool
) -> list[str]:
    """A function, a whole class with gaps in it, or the written methods of a subclass."""
    if name in chapter.extends:
        lines = [f"class {name}(given.{name}):"]
        lines += [f'    """Yours: {", ".join(u for t in tasks for u in t.units)}."""']
        for task in tasks:
            for unit, contract in zip(task.units, task.contracts):
                node = source.find(unit)
                body = _gap(source, task, unit, contract) if gaps else source.cut(node)
                lines += ["", *body]
        return lines
    node = source.find(name)
    if not gaps:
        return source.cut(node)
    if not isinstance(node, ast.ClassDef):
        return _gap(source, tasks[0], name, tasks[0].contracts[0])
    return _class_with_gaps(source, node, tasks)


def _class_with_gaps(source: Source, node: ast.ClassDef, tasks: list[Task]) -> list[str]:
    """The class as it stands, with each written method replaced by its stub."""
    first = source.start(node)
    lines = source.cut(node)
    replaced = [
        (source.find(unit), _gap(source, task, unit, contract))
        for task in tasks
        for unit, contract in zip(task.units, task.contracts)
    ]
    # From the last to the first, so that earlier line numbers stay right.
    for method, text in sorted(replaced, key=lambda pair: -pair[0].lineno):
        assert method.end_lineno is not None
        lines[source.start(method) - first : method.end_lineno - first] = text
    return lines


def _gap(source: Source, task: Task, unit: str, contract: str) -> list[str]:
    """Signature, contract, worked example, then the line that says it is still to do."""
    node = source.find(unit)
    indent = " " * (node.col_offset + 4)
    text = contract
    # torch's private forms are refused too, and nobody needs to be told of them.
    names = ", ".join(name.lstrip(".") for name in task.forbidden if "._" not in name)
    if names:
        wrapper = textwrap.TextWrapper(
            100 - len(indent), break_long_words=False, break_on_hyphens=False
        )
        text += "\n\n" + wrapper.fill(f"Not allowed: {names}.")
    if unit == task.units[0]:
        text += f"\n\nExample:\n{textwrap.indent(task.example, '    ')}"
    lines = source.signature(node)
    # A comment above the reference may explain the answer: the stub starts at the signature.
    while lines[0].lstrip().startswith("#"):
        lines = lines[1:]
    todo = task.todos[task.units.index(unit)]
    quote = 'r"""' if "\\" in text else '"""'
    body = f'{quote}{text}\n"""\n# TODO({task.id}): {todo}\n'
    body += f'raise NotImplementedError("{task.id}: {unit}")'
    return lines + textwrap.indent(body, indent, lambda line: line.strip() != "").splitlines()


def _dependencies(
    source: Source, chapter: Chapter, tasks: list[Task], foreign: set[str]
) -> tuple[list[ast.stmt], set[str]]:
    """Helpers and constants of the module that the units need, and every name in use."""
    open_names: set[str] = set()
    for task in tasks:
        for unit in task.units if task.name in chapter.extends else (task.name,):
            open_names |= names_used(source.find(unit))
    helpers: dict[str, ast.stmt] = {}
    used: set[str] = set()
    while open_names:
        name = open_names.pop()
        used.add(name)
        node = source.definitions.get(name)
        if node is not None and name not in foreign | helpers.keys() | set(chapter.names):
            helpers[name] = node
            open_names |= names_used(node) - used
    ordered = sorted(set(helpers.values()), key=lambda node: node.lineno)
    return ordered, used


def _stub_header(chapter: Chapter) -> str:
    points = sum(task.points for task in chapter.tasks)
    return (
        f'"""Chapter {chapter.id[2:]}: {chapter.title} ({chapter.minutes} minutes, '
        f"{points} points).\n\n{textwrap.fill(chapter.goal, 98)}\n"
        f"Replace each `raise NotImplementedError`, then run:\n"
        f"    pytest exercises/{chapter.test_file}\n"
        f"Stuck? minivllm course hint {chapter.tasks[0].id}\n"
        f'To look around: minivllm course try {chapter.id}\n"""'
    )


def _solution_header(chapter: Chapter) -> str:
    modules = dict.fromkeys(task.source for task in chapter.tasks)
    origin = ", ".join(module.replace(".", "/") + ".py" for module in modules)
    made = f"Generated from {origin} by `python -m minivllm.course build`:"
    made = made if len(made) <= 100 else textwrap.fill(made, 100)
    return (
        f'"""Solution of chapter {chapter.id[2:]}, {chapter.title}. The reasons stand in '
        f'{chapter.id}_{chapter.slug}.md.\n\n{made}\nedit there, not here.\n"""'
    )
