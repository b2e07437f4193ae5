"""Figures of the lessons on whole models and stages, in the style of `plot`.

Owns the chain of a model, the wiring of a layer, the roofline chart, milliseconds per token against
length, and which tokens a decode loop computes. Never measures: it draws what it is given.
Lessons 05 and 06.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from minivllm.plot import MARKERS, PALETTE, panels

# Name of a box and the index of its colour. q and k have a column of their own, v passes under it.
_ATTENTION = (("RMSNorm", 4), ("qkv_proj", 0), ("RoPE", 4), ("attend", 3), ("o_proj", 0))
_MLP = (("RMSNorm", 4), ("gate_up_proj", 0), ("silu(gate) * up", 4), ("down_proj", 0))

STEP = 1.14  # from one box to the next
LOW, HIGH = 0.95, 2.6  # the boxes of a layer
_ARROW: dict[str, Any] = {"arrowstyle": "-|>", "color": "#666666", "shrinkA": 0, "shrinkB": 0}


def model_chain(boxes: Mapping[str, str], start: str = "ids", end: str = "logits") -> Figure:
    """A whole model from left to right: box -> what to write under its name."""
    figure, axes = panels(height=1.0)
    ax = axes[0]
    ax.set_axis_off()
    width, gap = 1.5, 0.4
    ax.set_xlim(-1.0, len(boxes) * (width + gap) + 0.9)
    ax.set_ylim(0, 1)
    ax.text(-gap - 0.1, 0.5, start, ha="right", va="center", fontsize=9)
    for place, (name, shape) in enumerate(boxes.items()):
        x = place * (width + gap)
        ax.annotate("", (x - 0.04, 0.5), (x - gap + 0.04, 0.5), arrowprops=_ARROW)
        _box(ax, x, name, shape, (4, 0, 4, 0)[place % 4], (0.1, 0.9), width)
    x = len(boxes) * (width + gap)
    ax.annotate("", (x - 0.04, 0.5), (x - gap + 0.04, 0.5), arrowprops=_ARROW)
    ax.text(x, 0.5, end, ha="left", va="center", fontsize=9)
    return figure


def layer_wiring(shapes: Mapping[str, str] | None = None, qk_norm: bool = True) -> Figure:
    """A decoder layer: the residual stream below, its two halves above it.

    shapes: box -> what to write under its name, such as the shape that leaves it; "v" is written
    beside v's way past RoPE. qk_norm: each head of q and k is normalised before RoPE.
    """
    figure, axes = panels(height=3.1)
    ax = axes[0]
    ax.set_axis_off()
    ax.set_xlim(-0.5, 11.2)
    ax.set_ylim(-0.7, 3.1)
    ax.annotate("", (11.15, 0), (-0.45, 0), arrowprops={"arrowstyle": "-|>", "lw": 3, "color": "k"})
    ax.text(-0.45, -0.5, "residual stream x, never normalised", fontsize=9)
    for start, boxes, title in ((0.0, _ATTENTION, "attention half"), (6.1, _MLP, "MLP half")):
        ax.text(start + 0.05, HIGH + 0.25, title, fontsize=9, style="italic")
        first, last = start + 0.52, start + (len(boxes) - 1) * STEP + 0.52
        ax.annotate("", (first, LOW - 0.03), (first, 0), arrowprops=_ARROW)
        for place, (name, color) in enumerate(boxes):
            x = start + place * STEP + 0.1
            if name == "RoPE":
                _rotation(ax, x, shapes or {}, qk_norm)
                continue
            _box(ax, x, name, (shapes or {}).get(name, ""), color)
            if place and name != "attend":  # the arrows to attend are drawn with RoPE
                middle = (LOW + HIGH) / 2
                ax.annotate("", (x - 0.02, middle), (x - 0.26, middle), arrowprops=_ARROW)
        ax.annotate("", (last, 0.12), (last, LOW - 0.03), arrowprops=_ARROW)
        ax.plot(last, 0, "o", color="white", markeredgecolor="k", markersize=11, zorder=3)
        ax.text(last, -0.01, "+", ha="center", va="center", zorder=4)
    return figure


def roofline(
    roofs: Mapping[str, tuple[float, float]],
    points: Mapping[str, Mapping[str, tuple[float, float]]],
    limits: Mapping[str, Mapping[str, float]] | None = None,
) -> Figure:
    """Operations per second against operations per byte, one panel a machine.

    roofs: title -> (bytes/s, operations/s); points: title -> name -> (operations per byte,
    operations/s), named in the order of growing intensity. limits: title -> name -> operations per
    byte of what was not measured: a hollow mark on the roof, which it can reach at most.
    """
    figure, axes = panels(len(roofs), height=3.4)
    for ax, (title, (bandwidth, peak)) in zip(axes, roofs.items()):
        ridge = peak / bandwidth
        dots = points.get(title, {})
        marks = (limits or {}).get(title, {})
        reach = [*(intensity for intensity, _ in dots.values()), *marks.values()]
        x = np.array([min([ridge / 50, *reach]) / 2, ridge, max([ridge * 50, *reach]) * 2])
        ax.plot(x, np.minimum(peak, x * bandwidth) / 1e9, color="k", linewidth=2)
        ax.fill_between(x[:2], 0, x[:2] * bandwidth / 1e9, color=PALETTE[1], alpha=0.15, lw=0)
        ax.fill_between(x[1:], 0, peak / 1e9, color=PALETTE[2], alpha=0.15, lw=0)
        ax.set_xscale("log")
        ax.set_yscale("log")
        # Room below the lowest mark for the words at the bottom.
        lowest = min([peak / 400, *(min(peak, mark * bandwidth) / 8 for mark in marks.values())])
        ax.set_ylim(lowest / 1e9, peak / 1e9 * 2)
        ax.text(0.03, 0.03, "memory is the limit", transform=ax.transAxes, fontsize=7.5)
        right: dict[str, Any] = {"transform": ax.transAxes, "ha": "right", "fontsize": 7.5}
        ax.text(0.97, 0.03, "arithmetic is the limit", **right)
        for index, (name, (intensity, rate)) in enumerate(dots.items()):
            color, marker = PALETTE[(0, 3, 5, 4, 7)[index % 5]], MARKERS[index % 8]
            ax.plot(intensity, rate / 1e9, marker, color=color, markersize=7, label=name)
        for index, (name, intensity) in enumerate(marks.items()):
            rate = min(peak, intensity * bandwidth)
            hollow: dict[str, Any] = {"markersize": 8, "markerfacecolor": "white", "zorder": 3}
            hollow.update(color=PALETTE[(0, 3)[index % 2]], markeredgewidth=2, linestyle="none")
            label = f"{name}: at most"
            ax.plot(intensity, rate / 1e9, marker=MARKERS[index % 8], label=label, **hollow)
        ax.set_xlabel("operations per byte")
        ax.set_ylabel("Gflop/s" if ax is axes[0] else "")
        ax.set_title(title, loc="left", fontsize=10)
        if dots or marks:
            ax.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.1))
    return figure


def latency(
    lengths: Sequence[int],
    seconds: Mapping[str, Sequence[float]],
    title: str = "this machine",
    record: Mapping[str, Any] | None = None,
) -> Figure:
    """Milliseconds for one more token against the tokens before it, one line a stage.

    record: what `minivllm.bench.record_stages` wrote; without one there is no second panel.
    """
    figure, axes = panels(2 if record else 1)
    _latency_panel(axes[0], lengths, seconds, title)
    if record:
        curves = record["latency"]
        where = f"{record['environment'].get('gpu', 'GPU')} (recorded)\n{curves['model']}"
        _latency_panel(axes[1], curves["lengths"], curves["seconds"], where)
    return figure


def computed_tokens(prompt: int, new: int) -> Figure:
    """Which positions go through the model in each step, without a cache and with one."""
    figure, axes = panels(2, height=2.6)
    steps, positions = np.arange(new)[:, None], np.arange(prompt + new - 1)[None, :]
    there = positions < prompt + steps
    fresh = there & ((positions >= prompt + steps - 1) | (steps == 0))
    colors = ListedColormap(["#f2f2f2", PALETTE[4], PALETTE[3]])
    for ax, name, again in zip(axes, ("everything again", "with a KV cache"), (2, 1)):
        cells = np.where(fresh, 2, np.where(there, again, 0))
        edges = np.arange(positions.size + 1) - 0.5, np.arange(new + 1) - 0.5
        style: dict[str, Any] = {"cmap": colors, "vmin": 0, "vmax": 2, "edgecolors": "white"}
        ax.pcolormesh(*edges, cells, linewidth=1.0, **style)
        ax.invert_yaxis()
        ax.grid(visible=False)
        ax.tick_params(length=0)
        ax.set_xlabel("position in the text")
        ax.set_ylabel("step" if ax is axes[0] else "")
        count = int((cells == 2).sum())
        ax.set_title(f"{name}: {count} tokens computed", loc="left", fontsize=10)
    keys = [Patch(color=PALETTE[3], label="computed"), Patch(color=PALETTE[4], label="kept")]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _rotation(ax: Axes, x: float, shapes: Mapping[str, str], qk_norm: bool) -> None:
    """The column between qkv_proj and attend: q and k above, v past them below."""
    top = HIGH - 0.6 if qk_norm else HIGH
    low, v_at = LOW + 0.38, LOW + 0.08
    entry = HIGH - 0.2 if qk_norm else (low + top) / 2
    if qk_norm:
        _box(ax, x, "RMSNorm per head", "", 4, (HIGH - 0.4, HIGH))
        ax.annotate("", (x + 0.44, top + 0.03), (x + 0.44, HIGH - 0.43), arrowprops=_ARROW)
    _box(ax, x, "RoPE", shapes.get("RoPE", ""), 4, (low, top))
    ax.annotate("", (x - 0.02, entry), (x - 0.24, entry), arrowprops=_ARROW)
    ax.annotate("", (x + 1.12, (low + top) / 2), (x + 0.9, (low + top) / 2), arrowprops=_ARROW)
    ax.annotate("", (x + 1.12, v_at), (x - 0.24, v_at), arrowprops=_ARROW)
    where: dict[str, Any] = {"ha": "center", "va": "bottom", "color": "#444444"}
    ax.text(x + 0.44, v_at + 0.04, shapes.get("v", "v"), fontsize=6.5, **where)


def _box(
    ax: Axes,
    x: float,
    name: str,
    shape: str,
    color: int,
    span: tuple[float, float] = (LOW, HIGH),
    width: float = 0.88,
) -> None:
    low, high = span
    style: dict[str, Any] = {"boxstyle": "round,pad=0.03", "facecolor": PALETTE[color]}
    ax.add_patch(FancyBboxPatch((x, low), width, high - low, alpha=0.3, **style))
    # Upper and lower part of the box; the name alone stands in the middle.
    upper, lower = (low + 0.68 * (high - low), low + 0.26 * (high - low))
    centred: dict[str, Any] = {"ha": "center", "va": "center"}
    y = upper if shape else (low + high) / 2
    ax.text(x + width / 2, y, _two_lines(name), fontsize=7.5, **centred)
    size = 6.0 if "\n" in shape else 6.5
    ax.text(x + width / 2, lower, shape, fontsize=size, color="#444444", **centred)


def _two_lines(name: str) -> str:
    """A long name broken at its middle space, for a narrow box."""
    words = name.split(" ")
    if len(words) < 2:
        return name.replace("_up_", "_up\n_") if len(name) > 11 else name
    middle = len(words) // 2
    return f"{' '.join(words[:middle])}\n{' '.join(words[middle:])}"


def _latency_panel(
    ax: Axes, lengths: Sequence[int], seconds: Mapping[str, Sequence[float]], title: str
) -> None:
    for index, (name, values) in enumerate(seconds.items()):
        milliseconds = [1e3 * value for value in values]
        color, marker = PALETTE[(3, 0, 2)[index % 3]], MARKERS[index % 8]
        ax.plot(lengths, milliseconds, color=color, marker=marker, markersize=4, label=name)
    ax.set_ylim(bottom=0)  # flat is to look flat
    ax.set_xlabel("tokens before it")
    ax.set_ylabel("ms for one more token")
    ax.set_title(title, loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=9)
