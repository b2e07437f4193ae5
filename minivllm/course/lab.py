"""`minivllm course lab`: a student's own copies of the lessons, and JupyterLab on them.

Owns the copying, and the command line and environment of the server. A copy starts without outputs:
they would answer what the lesson asks one to guess. Never overwrites a copy and never changes a
user's own Jupyter settings. JupyterLab's root is the course's folder, so that a
lesson's link to its exercise opens beside it; it starts in work/. Serves chapter 00.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from minivllm.course.lessons import lesson_paths
from minivllm.course.root import work_folder
from minivllm.course.runner import child_environment
from minivllm.course.table import Course

# Defaults of JupyterLab for this server only: no question about news. A user's own settings win.
SETTINGS = Path(__file__).parent / "data" / "jupyter"


def copy_lessons(course: Course) -> list[str]:
    """Copy notebooks that are not yet in work/; a student's own copies are never touched.

    ValueError where work/ cannot be written: a shared installation, or somebody else's folder.
    """
    target = work_folder(course.root)
    messages = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path in lesson_paths(course):
            copy = target / path.name
            if copy.exists():
                messages.append(f"kept your work/{path.name}")
            else:
                # Written, not copied: lessons of a shared folder may be read-only, copies never.
                copy.write_text(without_outputs(path.read_text(encoding="utf-8")), encoding="utf-8")
                messages.append(f"copied work/{path.name}")
    except OSError as error:
        raise ValueError(
            f"cannot write {target} ({error.strerror}): copy exercises/ and lessons/ to a folder "
            "of your own and run this there"
        ) from error
    return messages


def without_outputs(notebook: str) -> str:
    """A notebook's text as if no cell had been run; laid out as Jupyter writes it."""
    content = json.loads(notebook)  # not by nbformat: a plain install copies lessons too
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def lab_command(course: Course, options: Sequence[str] = ()) -> list[str]:
    """The command line of JupyterLab for this course; run it with `lab_environment()`."""
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={course.root}"]
    command += [f"--LabApp.default_url=/lab/tree/{work_folder(course.root).name}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # Containers run as root; the server listens on this machine only and asks for a token.
        command.append("--allow-root")
    return [*command, *options]


def lab_environment() -> dict[str, str]:
    """One thread a kernel, this package importable, and our defaults before the system's."""
    environment = child_environment()
    paths = [str(SETTINGS), environment.get("JUPYTER_CONFIG_PATH", "")]
    environment["JUPYTER_CONFIG_PATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def has_browser(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a graphical browser can be opened from here."""
    if environment.get("BROWSER"):
        return True
    screen = environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY")
    if sys.platform.startswith("linux") and not screen:
        return False  # webbrowser would find a text browser such as w3m, which cannot show Lab
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def open_lab(course: Course, launch: bool = True, browser: bool = True, port: int = 8888) -> int:
    """Copy the lessons and open JupyterLab on them.

    `browser=False` starts the server and leaves the opening of its address to the user; `port` is
    the first one tried. ValueError where JupyterLab is not installed.
    """
    print("\n".join(copy_lessons(course)))
    if not launch:
        return 0
    if os.environ.get("JUPYTER_SERVER_URL"):
        print("This terminal belongs to a Jupyter server: open work/ in its file browser.")
        return 0
    if find_spec("jupyterlab") is None:
        raise ValueError("JupyterLab is not installed: pip install -e '.[lessons]'")
    if browser and not has_browser():
        print("There is no browser here. This starts JupyterLab without one:")
        print(f"    cd {course.root} && minivllm course lab --no-browser --port {port}")
        print("Open the address that it prints. From your own computer, through ssh:")
        print(f"    ssh -L {port}:localhost:{port} THIS_MACHINE")
        return 0
    options = [f"--ServerApp.port={port}", *([] if browser else ["--no-browser"])]
    return _run(lab_command(course, options), course.root)


def _run(command: Sequence[str], folder: Path) -> int:
    """Run the server until it ends."""
    sys.stdout.flush()
    process = subprocess.Popen(command, cwd=folder, env=lab_environment())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The server gets the same Ctrl-C, asks whether to stop, and ends its kernels itself.
            continue
