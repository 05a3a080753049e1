"""[pure] Plots as SVG text, with matplotlib (the extra ``bench``).

Text stays text in the SVG, and the same figures give the same bytes, so that a committed report
changes only when its numbers do.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4c6a92", "#d1495b", "#66a182", "#edae49", "#7d5ba6", "#2e4057", "#8d6346", "#00798c")


class NoPlots(RuntimeError):
    """matplotlib is not installed; the message says how to get it."""


def require() -> None:
    """Raises ``NoPlots``. Called before an hour of measuring and not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPlots(
            "plots need matplotlib: pip install 'kvloop[bench]' (or 'pip install matplotlib')"
        ) from None


@dataclass(frozen=True)
class Line:
    """One curve. ``low`` and ``high``: ends of its error bars, as long as ``y``, or empty."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False
    colour: str = ""
    marks: bool = True


def lines(
    name: str,
    curves: Sequence[Line],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    vertical: Mapping[str, float] | None = None,
    steps: bool = False,
) -> str:
    """Curves over a common x axis. ``vertical``: labelled lines at these x."""

    def draw(axes: Axes) -> None:
        for curve, colour in zip(curves, _colours(len(curves)), strict=True):
            shade = curve.colour or colour
            style: dict[str, Any] = {
                "color": shade,
                "linestyle": "--" if curve.dashed else "-",
                "label": curve.label,
                "linewidth": 1.6,
            }
            if curve.marks and not steps:
                style |= {"marker": "o", "markersize": 4}
            if steps:
                style["drawstyle"] = "steps-post"
            axes.plot(list(curve.x), list(curve.y), **style)
            if curve.low:
                axes.fill_between(
                    list(curve.x), list(curve.low), list(curve.high), color=shade, alpha=0.15, lw=0
                )
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        for label, place in (vertical or {}).items():
            axes.axvline(place, color="#8b949e", linewidth=1, linestyle=":")
            axes.annotate(
                label,
                (place, 1),
                xycoords=("data", "axes fraction"),
                rotation=90,
                va="top",
                ha="right",
                fontsize=8,
                color="#57606a",
            )
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if len(curves) > 1:
            axes.legend(frameon=False, fontsize=9)

    return _svg(name, draw)


def stacked(
    name: str,
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    x: str,
) -> str:
    """Horizontal bars made of parts, one a label."""

    def draw(axes: Axes) -> None:
        places = range(len(labels))
        left = [0.0] * len(labels)
        for (label, values), colour in zip(parts.items(), _colours(len(parts)), strict=True):
            axes.barh(places, list(values), left=left, label=label, color=colour, height=0.7)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_yticks(list(places), list(labels))
        axes.invert_yaxis()
        axes.set_xlabel(x)
        axes.legend(
            frameon=False, fontsize=9, ncols=len(parts), loc="lower left", bbox_to_anchor=(0, 1)
        )

    return _svg(name, draw, height=1.2 + 0.32 * len(labels))


@dataclass(frozen=True)
class Interval:
    label: str
    value: float
    low: float
    high: float


def forest(name: str, intervals: Sequence[Interval], *, x: str, neutral: float) -> str:
    """Values with their intervals on a logarithmic axis, and the line where nothing changes."""

    def draw(axes: Axes) -> None:
        finite = [v for i in intervals for v in (i.value, i.low, i.high) if 0 < v < float("inf")]
        low, high = min([*finite, neutral / 1.2]), max([*finite, neutral * 1.2])
        for place, each in enumerate(intervals):
            good = each.low > neutral
            bad = each.high < neutral
            colour = COLOURS[2] if good else COLOURS[1] if bad else "#6e7781"
            ends = [max(each.low, low / 1.1), min(each.high, high * 1.1)]
            axes.plot(ends, [place, place], color=colour, linewidth=2)
            axes.plot([each.value], [place], marker="o", color=colour, markersize=6)
        axes.axvline(neutral, color="#24292f", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlim(low / 1.15, high * 1.15)
        ticks = [
            t for t in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50) if low / 1.15 < t < high * 1.15
        ]
        axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
        axes.minorticks_off()
        axes.set_yticks(list(range(len(intervals))), [each.label for each in intervals])
        axes.invert_yaxis()
        axes.set_xlabel(x)

    return _svg(name, draw, height=1.0 + 0.34 * len(intervals))


def cumulative(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Points of the distribution: value, and share of the values up to it."""
    ordered = sorted(values)
    return ordered, [count / len(ordered) for count in accumulate(1 for _ in ordered)]


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _svg(name: str, draw: Callable[[Axes], None], *, height: float = 4.2) -> str:
    require()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: dict[str, Any] = {
        # Ids are hashes with this salt: figures of one page must not share any.
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#eaeef2",
        "axes.axisbelow": True,
    }
    with rc_context(settings):
        figure = Figure(figsize=(8.4, height), layout="constrained")
        draw(figure.add_subplot())
        output = io.StringIO()
        figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    text = output.getvalue()
    text = text[text.index("<svg") :]
    # Ids are unique within a figure only; a page holds several.
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text).strip()
