"""The lessons' figures: one palette, axes with units, readable at a notebook's width.

Owns how plots look. Never measures and never computes a result: it draws what it is given, and
leaves a panel out where there is no record. matplotlib is needed by lessons only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.ticker import MaxNLocator

# Okabe and Ito (2008): eight colours that colour-blind readers tell apart, in our order of use.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")
# Marks differ too, so that a figure survives a black-and-white printer.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH = 7.0  # inches; 700 pixels at the 100 dpi below, a notebook's column
STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def panels(count: int = 1, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes side by side, in the course's style."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, count, figsize=(WIDTH, height), layout="constrained")
    # Closed at once: notebooks show the returned figure, and nothing is shown twice.
    plt.close(figure)
    return figure, [axes] if count == 1 else list(axes)


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    title: str = "",
    logx: bool = False,
    logy: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """One line a series over common x. Labels carry the units. Returns the figure."""
    figure, ax = _figure_of(ax)
    for index, (name, values) in enumerate(series.items()):
        color, marker = PALETTE[index % 8], MARKERS[index % 8]
        ax.plot(x, values, label=name, color=color, marker=marker, markersize=4)
    if logx:
        ax.set_xscale("log")
    if logy:
        ax.set_yscale("log")
    _label(ax, xlabel, ylabel, title)
    if len(series) > 1:
        ax.legend(frameon=False)
    return figure


def bars(
    values: Mapping[str, float],
    ylabel: str,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """One bar an entry, with its number above it. Returns the figure."""
    figure, ax = _figure_of(ax)
    drawn = ax.bar(list(values), list(values.values()), color=PALETTE[: len(values)], width=0.6)
    ax.bar_label(drawn, fmt=_short, padding=2)
    ax.margins(y=0.12)
    ax.grid(axis="x", visible=False)
    _label(ax, "", ylabel, title)
    return figure


def ladder(
    runs: Mapping[str, float],
    recorded: Mapping[str, float] | None = None,
    recorded_on: str = "",
    unit: str = "generated tokens / s",
) -> Figure:
    """The course's ladder: throughput of each stage, in the order of the lessons.

    runs: stage -> tokens per second on this machine. recorded: the same from a GPU run; without a
    record there is one panel, not an empty second one.
    """
    # Bars keep their thickness while the ladder grows.
    figure, axes = panels(
        2 if recorded else 1, height=1.1 + 0.55 * len({**runs, **(recorded or {})})
    )
    _ladder_panel(axes[0], runs, unit, "this machine")
    if recorded:
        where = f"{recorded_on} (recorded)" if recorded_on else "recorded on a GPU"
        _ladder_panel(axes[1], recorded, unit, where)
    return figure


def memory(
    stages: Mapping[str, Mapping[str, int]], title: str = "", ax: Axes | None = None
) -> Figure:
    """Stacked bars of bytes by kind for each stage: {"paged": {"used": ..., "reserved": ...}}."""
    figure, ax = _figure_of(ax)
    kinds = list(dict.fromkeys(kind for parts in stages.values() for kind in parts))
    largest = max((sum(parts.values()) for parts in stages.values()), default=0)
    scale, unit = _byte_unit(largest)
    bottom = [0.0] * len(stages)
    for index, kind in enumerate(kinds):
        heights = [parts.get(kind, 0) / scale for parts in stages.values()]
        color = PALETTE[index % 8]
        ax.bar(list(stages), heights, bottom=bottom, label=kind, color=color, width=0.6)
        bottom = [low + high for low, high in zip(bottom, heights)]
    ax.grid(axis="x", visible=False)
    _label(ax, "", unit, title)
    if len(kinds) > 1:
        ax.legend(frameon=False)
    return figure


def heatmap(
    values: Any,
    xlabel: str,
    ylabel: str,
    title: str = "",
    label: str = "",
    diverging: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """A matrix as colours, row 0 on top. `label` names the colours and adds a bar.

    diverging: for values of both signs; white is zero. Returns the figure.
    """
    figure, ax = _figure_of(ax)
    matrix = np.asarray(values, dtype=float)
    limit = float(np.abs(matrix).max()) or 1.0
    style: dict[str, Any] = {"cmap": "cividis"}
    if diverging:
        style = {"cmap": "PuOr", "vmin": -limit, "vmax": limit}
    image = ax.imshow(matrix, aspect="auto", interpolation="nearest", **style)
    if label:
        figure.colorbar(image, ax=ax, label=label)
    for axis in (ax.xaxis, ax.yaxis):  # rows and columns are counted: no ticks between them
        axis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False)
    _label(ax, xlabel, ylabel, title)
    return figure


def mask(allowed: Any, q_start: int, title: str = "", ax: Axes | None = None) -> Figure:
    """Which key each query may read: [Tq, Tk] of booleans, the queries from position q_start."""
    figure, ax = _figure_of(ax)
    cells = np.asarray(allowed, dtype=float)
    rows, columns = cells.shape
    # Edges between whole numbers, so that the ticks are positions and lie in mid-cell.
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) + q_start - 0.5
    colors = ListedColormap(["#eeeeee", PALETTE[0]])
    ax.pcolormesh(*edges, cells, cmap=colors, vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
    ax.set_aspect("equal")
    ax.invert_yaxis()
    ax.set_xticks(range(columns))
    ax.set_yticks(range(q_start, q_start + rows))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    _label(ax, "key position", "query position", title)
    return figure


def hands(angles: Sequence[float], title: str = "", ax: Axes | None = None) -> Figure:
    """Clock hands at `angles` (radians, counter-clockwise from the right), numbered from 0."""
    figure, ax = _figure_of(ax)
    ax.add_patch(Circle((0, 0), 1, fill=False, color="#bbbbbb"))
    numbered = 0.0
    for index, angle in enumerate(angles):
        x, y = math.cos(angle), math.sin(angle)
        # Later hands are stronger, so that the direction of turning can be seen.
        alpha = 0.3 + 0.7 * (index + 1) / len(angles)
        ax.plot([0, x], [0, y], color=PALETTE[0], alpha=alpha, linewidth=2)
        if index == 0 or abs(angle - numbered) > 0.28:  # numbers closer than that would overlap
            ax.text(1.17 * x, 1.17 * y, str(index), ha="center", va="center", fontsize=8)
            numbered = angle
    ax.set_xlim(-1.35, 1.35)
    ax.set_ylim(-1.35, 1.35)
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.set_title(title, fontsize=10)
    return figure


def _ladder_panel(ax: Axes, runs: Mapping[str, float], unit: str, title: str) -> None:
    names = list(runs)
    # Horizontal: names of stages are read without turning the head, the newest is at the bottom.
    drawn = ax.barh(names, list(runs.values()), color=PALETTE[0], height=0.6)
    if names:
        drawn[-1].set_color(PALETTE[3])
    ax.bar_label(drawn, fmt=_short, padding=3)
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.grid(axis="y", visible=False)
    _label(ax, unit, "", title)


def _short(value: float) -> str:
    """Three digits, thousands grouped, never an exponent above 1."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _byte_unit(count: int) -> tuple[float, str]:
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= scale:
            return float(scale), unit
    return 1.0, "bytes"


def _figure_of(ax: Axes | None) -> tuple[Figure, Axes]:
    if ax is None:
        figure, axes = panels()
        return figure, axes[0]
    parent: Any = ax.figure  # typed as a figure or a part of one
    return parent, ax


def _label(ax: Axes, xlabel: str, ylabel: str, title: str) -> None:
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if title:
        ax.set_title(title, loc="left", fontsize=10)
