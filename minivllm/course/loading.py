"""Loads one exercise file by path, afresh each time.

Owns the import guard and the account of what is wrong with a file. A file that does not parse, does
not import or uses what is forbidden is reported, never raised: one broken chapter must not hide the
others.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minivllm.course.forbidden import Violation, allowed_import, find_violations
from minivllm.course.source import GIVEN
from minivllm.course.stubs import digest, read_text
from minivllm.course.table import Chapter


@dataclass(frozen=True)
class LoadedFile:
    """An exercise file and what came of loading it."""

    chapter: str
    path: Path
    digest: str = ""
    module: ModuleType | None = None
    problem: str = ""  # one line: why there is no module
    violations: tuple[Violation, ...] = ()


def load_file(path: Path, chapter: Chapter, given: ModuleType) -> LoadedFile:
    """Parse, check and execute `path`. Never raises for what the file does."""
    if not path.is_file():
        return LoadedFile(chapter.id, path, problem=f"there is no {path.name} in {path.parent}")
    try:
        text = read_text(path)
        tree = ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f" line {line}" if line else ""
        reason = getattr(error, "msg", None) or str(error)
        return LoadedFile(chapter.id, path, problem=f"{path.name}{where}: {reason}")
    mark = digest(text)
    violations = find_violations(tree, chapter)
    if any(violation.fatal for violation in violations):
        # Not run at all: it could do harm before any test.
        return LoadedFile(chapter.id, path, mark, None, "", violations)
    module = ModuleType(f"minivllm_exercise_{chapter.id}_{mark}")
    module.__file__ = str(path)
    module.__dict__["__builtins__"] = {
        **vars(builtins),
        "__import__": _guarded_import(chapter, given),
    }
    # Registered before it runs: dataclasses look their module up by name.
    sys.modules[module.__name__] = module
    linecache.checkcache(str(path))
    try:
        exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a file that ends the program is broken
        problem = f"{path.name}{location(error, path)}: {type(error).__name__}: {error}"
        return LoadedFile(chapter.id, path, mark, None, problem)
    return LoadedFile(chapter.id, path, mark, module, "", violations)


def location(error: BaseException, path: Path) -> str:
    """` line N` of the last frame of `error` inside `path`, or nothing."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" line {line}" if line else ""


def _guarded_import(chapter: Chapter, given: ModuleType) -> Callable[..., Any]:
    """The `__import__` of one exercise file; all other modules keep the usual one."""
    real_import = builtins.__import__

    def guarded(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        if name == GIVEN and fromlist:
            return given
        if name == "minivllm.course" and fromlist and set(fromlist) == {"given"}:
            holder = ModuleType("minivllm.course")
            holder.__dict__["given"] = given
            return holder
        if level or name.startswith("minivllm") or not allowed_import(name, chapter):
            raise ImportError(f"an exercise of {chapter.id} may not import {name}")
        return real_import(name, globals, locals, fromlist or (), level)

    return guarded
