"""`make browser`: a lesson in a real JupyterLab, driven in a real browser, as a student does it.

No test of `make test`: it needs Debian's chromium and chromium-driver. It copies exercises and one
lesson to a folder of their own (a classroom machine's layout), starts JupyterLab as `course lab`
does, opens the lesson, runs all cells from the menu, waits for the kernel, saves, and judges the
saved file. Screenshots, the saved notebook and the server's log stay in results/browser/.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
APT = "apt-get install -y chromium chromium-driver"
START, RUN, WHOLE = 120, 240, 600  # seconds: a start, a notebook, everything
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
    *("--no-proxy-server", "--window-size=1400,1100"),
)


def faults(saved: dict[str, Any], committed: dict[str, Any]) -> list[str]:
    """What is wrong with a notebook that was run and saved, beside the committed one."""
    found = []
    pairs = list(zip(code_cells(saved), code_cells(committed)))
    if len(code_cells(saved)) != len(code_cells(committed)):
        found.append("the saved notebook has another number of code cells")
    for number, (cell, model) in enumerate(pairs, 1):
        if cell["execution_count"] != number:
            found.append(f"code cell {number} has the count {cell['execution_count']}")
        errors = [o for o in cell["outputs"] if o["output_type"] == "error"]
        found += [f"code cell {number}: {o['ename']}: {o['evalue']}" for o in errors]
        missing = kinds(model) - kinds(cell)
        if missing:
            found.append(f"code cell {number} lacks the outputs {sorted(missing)}")
    return found


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The code cells, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell: dict[str, Any]) -> set[str]:
    """The kinds of a cell's rich outputs. Printed text may come and go with the machine."""
    return {kind for output in cell["outputs"] for kind in output.get("data", {})}


def make_course(folder: Path, number: str) -> tuple[Any, Path, dict[str, Any]]:
    """Exercises and one lesson in `folder`; its copy in work/ without outputs; the committed one.

    Without outputs, so that whatever the saved file holds was made in this run.
    """
    from minivllm.course.lab import copy_lessons
    from minivllm.course.table import load_course

    (source,) = (ROOT / "lessons").glob(f"{number}_*.ipynb")
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "exercises", folder / "exercises", ignore=skip)
    (folder / "lessons").mkdir()
    shutil.copy(source, folder / "lessons")
    if (ROOT / "lessons" / "data").is_dir():
        shutil.copytree(ROOT / "lessons" / "data", folder / "lessons" / "data")
    course = load_course(folder)
    copy_lessons(course)
    copy = folder / "work" / source.name
    notebook = json.loads(copy.read_text(encoding="utf-8"))
    for cell in code_cells(notebook):
        cell |= {"outputs": [], "execution_count": None}
    copy.write_text(json.dumps(notebook, indent=1), encoding="utf-8")
    return course, copy, json.loads(source.read_text(encoding="utf-8"))


@contextmanager
def all_ended() -> Iterator[None]:
    """End every process that was started inside, whatever happens."""
    import psutil

    me = psutil.Process()
    before = set(me.children(recursive=True))
    try:
        yield
    finally:
        # Kernels have a session of their own, so a process group would not reach them.
        started = [p for p in me.children(recursive=True) if p not in before]
        for stop in ("terminate", "kill"):
            for process in started:
                with suppress(psutil.NoSuchProcess):
                    getattr(process, stop)()
            _, started = psutil.wait_procs(started, timeout=10)


def until(what: str, seconds: float, ask: Callable[[], Any], pause: float = 0.5) -> Any:
    """The first true answer of `ask`; TimeoutError that names what did not come."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = ask()
        if answer:
            return answer
        time.sleep(pause)
    raise TimeoutError(f"no {what} within {seconds} s")


def start_lab(course: Any, private: Path, log: Path) -> tuple[str, str]:
    """Start JupyterLab on a port of the system's choice; returns its address and token."""
    from minivllm.course.lab import lab_command, lab_environment

    # A user who has never started Jupyter: no settings, no workspace, the news question pending.
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        os.environ[name] = str(private / name.lower())
    os.environ.pop("MINIVLLM_COURSE", None)
    token = secrets.token_hex(16)
    options = ["--no-browser", "--ServerApp.port=0", f"--IdentityProvider.token={token}"]
    with open(log, "w", encoding="utf-8") as output:
        server = subprocess.Popen(
            lab_command(course, options),
            cwd=course.root,
            env=lab_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def address() -> str:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {server.returncode}; see {log}")
        files = list((private / "jupyter_runtime_dir").glob("jpserver-*.json"))
        if not files or not (text := files[0].read_text(encoding="utf-8")):
            return ""
        url = json.loads(text)["url"]
        with suppress(OSError):
            return url if urlopen(f"{url}api", timeout=10).status == 200 else ""
        return ""

    return until("answer of JupyterLab", START, address), token


def start_browser(chromium: str, driver: str, profile: Path) -> Any:
    """Debian's chromium under Debian's driver; selenium's own download manager is never asked."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    os.environ |= {
        "SE_OFFLINE": "true",
        "SE_AVOID_STATS": "true",
        "NO_PROXY": "localhost,127.0.0.1",
    }
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    browser.set_page_load_timeout(START)
    browser.set_script_timeout(60)
    return browser


class Page:
    """JupyterLab as one sees it: menus, cells, the kernel's light."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def find(self, css: str, text: str = "") -> Any:
        """The first visible element with that selector and text, or None."""
        script = """
            return [...document.querySelectorAll(arguments[0])].find(e =>
                e.getClientRects().length && (!arguments[1] || e.innerText.trim() == arguments[1]))
        """
        return self.browser.execute_script(script, css, text)

    def menu(self, bar: str, item: str) -> None:
        """Click an entry of a menu, as a person does."""
        for css, text in ((".lm-MenuBar-itemLabel", bar), (".lm-Menu-itemLabel", item)):
            until(f"menu entry {text!r}", 30, lambda c=css, t=text: self.find(c, t)).click()

    def idle(self) -> bool:
        """Whether a kernel is connected and has nothing to do.

        The notebook's light is idle before there is a kernel too; the status bar names it.
        """
        light = self.find(".jp-Notebook-ExecutionIndicator[data-status='idle']")
        bars = (
            "return [...document.querySelectorAll('.jp-StatusBar-TextItem')].map(e => e.innerText)"
        )
        return bool(light) and any("| Idle" in bar for bar in self.browser.execute_script(bars))

    def stays_idle(self) -> bool:
        """Idle for three seconds on end: while a session starts, the light goes on and off."""
        for _ in range(4):
            if not self.idle():
                return False
            time.sleep(1)
        return True

    def plot(self) -> dict[str, Any]:
        """Scroll until a figure is in the page, drawn; its size as decoded by the browser.

        JupyterLab draws a cell only when it comes near the window.
        """
        script = """
            const image = document.querySelector('.jp-OutputArea-output img[src^="data:image/png"]')
            const panel = document.querySelector('.jp-WindowedPanel-outer')
            if (!image) { panel.scrollTop += panel.clientHeight / 2; return null }
            image.scrollIntoView({block: 'center'})
            const box = image.getBoundingClientRect()
            if (!image.complete || box.top < 0 || box.bottom > window.innerHeight) return null
            return {width: image.naturalWidth, height: image.naturalHeight, shown: box.width}
        """
        self.browser.execute_script(
            "document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0"
        )
        return until("figure in the page", 60, lambda: self.browser.execute_script(script))


def run_lesson(page: Page, address: str, token: str, copy: Path) -> dict[str, Any]:
    """Open the lesson, run all its cells, save; returns the notebook as saved."""
    page.browser.get(f"{address}lab/tree/work/{copy.name}?token={token}")
    until("notebook in the page", START, lambda: page.find(".jp-Notebook .jp-Cell"))
    until("idle kernel", START, page.stays_idle)
    news = page.find(".Toastify__toast")
    if news:
        raise AssertionError(f"a pop-up greets the student: {news.text}")
    page.menu("Run", "Run All Cells")

    def saved() -> dict[str, Any] | None:
        # Between two cells the kernel is idle for a moment: the counts decide.
        time.sleep(2)
        if not page.idle():
            return None
        page.menu("File", "Save Notebook")
        time.sleep(1)
        notebook = json.loads(copy.read_text(encoding="utf-8"))
        done = all(cell["execution_count"] for cell in code_cells(notebook))
        failed = any(
            o["output_type"] == "error" for c in code_cells(notebook) for o in c["outputs"]
        )
        return notebook if done or failed else None

    return until("end of the notebook's run", RUN, saved)


def check(number: str, chromium: str, driver: str, artefacts: Path) -> list[str]:
    """The whole visit; returns the faults."""
    shutil.rmtree(artefacts, ignore_errors=True)
    artefacts.mkdir(parents=True)
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minivllm-lab-")))
        stack.enter_context(all_ended())
        course, copy, committed = make_course(private / "course", number)
        address, token = start_lab(course, private, artefacts / "jupyterlab.log")
        browser = start_browser(chromium, driver, private / "profile")
        stack.callback(browser.quit)
        page = Page(browser)
        try:
            saved = run_lesson(page, address, token, copy)
            size = page.plot()
        finally:
            # Most wanted when something went wrong.
            browser.save_screenshot(str(artefacts / "lab.png"))
            shutil.copy(copy, artefacts)
    print(f"a figure of {size['width']} x {size['height']} pixels, shown {size['shown']:.0f} wide")
    small = [] if size["width"] > 0 and size["shown"] > 100 else [f"the figure is {size}"]
    return faults(saved, committed) + small


def main() -> int:
    """0 all is well, 1 faults, 2 something is not installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lesson", nargs="?", default="02", help="its number (default: 02)")
    parser.add_argument("--artefacts", type=Path, default=ROOT / "results" / "browser")
    args = parser.parse_args()
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        print(f"chromium or its driver is missing. On Debian, as root: {APT}", file=sys.stderr)
        return 2

    def stop(number: int, frame: Any) -> None:
        # As an exception, so that everything started is ended.
        raise TimeoutError(f"stopped by {signal.Signals(number).name}")

    for name in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(name, stop)
    signal.alarm(WHOLE)
    began = time.monotonic()
    found = check(args.lesson, chromium, driver, args.artefacts)
    for fault in found:
        print(f"fault: {fault}", file=sys.stderr)
    verdict = "failed" if found else "ran in JupyterLab without a fault"
    print(f"lesson {args.lesson} {verdict} ({time.monotonic() - began:.0f} s); {args.artefacts}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
