"""Dashboards drawn with matplotlib: the panels' own queries, places, units and colours.

No Grafana is needed to see what the panels show. Text, stacking and the axis limits are taken from
the dashboard; everything else of Grafana's look is not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Series = tuple[str, list[float], list[float]]
"""Legend, seconds before now, values."""

_UNITS = {
    "percentunit": (100, " %"),
    "s": (1000, " ms"),
    "Bps": (1e-6, " MB/s"),
    "bytes": (1e-6, " MB"),
}


def series_of(result: list[dict[str, Any]], legend: str, now: float) -> list[Series]:
    """A range query's answer, with Grafana's {{label}} filled in."""
    found = []
    for each in result:
        name = re.sub(r"\{\{(\w+)\}\}", lambda m, of=each: of["metric"].get(m[1], ""), legend)
        points = [(float(at) - now, float(value)) for at, value in each["values"]]
        points = [point for point in points if point[1] == point[1]]
        if points:
            found.append((name, [x for x, _ in points], [y for _, y in points]))
    return found


def draw(dashboard: dict[str, Any], data: dict[int, list[Series]], path: Path) -> None:
    """``data``: panel id -> its series."""
    panels = dashboard["panels"]
    height = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels)
    figure = Figure(figsize=(16, height * 0.36), dpi=70)
    for panel in panels:
        place = panel["gridPos"]
        left, width = place["x"] / 24, place["w"] / 24
        bottom, tall = 1 - (place["y"] + place["h"]) / height, place["h"] / height
        if panel["type"] == "row":
            figure.text(0.01, bottom + tall * 0.2, panel["title"], weight="bold", size=13)
            continue
        box = (left + 0.03, bottom + tall * 0.17, width - 0.045, tall * 0.66)
        axes = figure.add_axes(box)
        axes.set_title(panel["title"], size=10, loc="left")
        _fill(axes, panel, data.get(panel["id"], []))
    figure.savefig(path)


def _fill(axes: Any, panel: dict[str, Any], series: list[Series]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    factor, unit = _UNITS.get(defaults["unit"], (1, ""))
    colours = {
        each["matcher"]["options"]: each["properties"][0]["value"]["fixedColor"]
        for each in panel["fieldConfig"]["overrides"]
    }
    if panel["type"] == "stat":
        axes.axis("off")
        value = series[0][2][-1] * factor if series else None
        text = "no data" if value is None else f"{value:.3g}{unit}"
        axes.text(0, 0.4, text, size=20, color=_threshold(defaults, series))
        return
    if panel["type"] == "heatmap":
        series = [each for each in series if each[0] != "+Inf"]
        rows = {name: values[-1] for name, _, values in series}
        axes.barh(list(rows), list(rows.values()))
        axes.tick_params(labelsize=6)
        return
    bottoms: dict[float, float] = {}
    for name, times, values in series:
        scaled = [value * factor for value in values]
        if defaults["custom"]["stacking"]["mode"] == "normal":
            below = [bottoms.get(at, 0) for at in times]
            scaled = [value + base for value, base in zip(scaled, below, strict=True)]
            bottoms |= dict(zip(times, scaled, strict=True))
        axes.plot(times, scaled, label=name, color=colours.get(name), linewidth=1.2)
    if "max" in defaults:
        axes.set_ylim(defaults.get("min", 0) * factor, defaults["max"] * factor * 1.05)
    elif series:
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}{unit}")
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if series:
        axes.legend(fontsize=6, loc="upper left", ncols=2)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes)


def _threshold(defaults: dict[str, Any], series: list[Series]) -> str:
    colour = "black"
    if series:
        for step in defaults["thresholds"]["steps"]:
            if step["value"] is None or series[0][2][-1] >= step["value"]:
                colour = step["color"]
    return colour
