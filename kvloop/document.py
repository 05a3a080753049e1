"""[pure] A report as blocks, and the two forms it takes: one HTML file and Markdown.

The HTML needs nothing from outside: plots are SVG inside it, there is no script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """One paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Table:
    """Cells are text; a cell that begins with a digit, sign or unit mark is set to the right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A plot: an ``<svg>`` element as text. ``name``: its file in the Markdown form."""

    name: str
    svg: str
    caption: str


Block = Heading | Text | Bullets | Code | Table | Figure

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
h1, h2, h3 { line-height: 1.25; margin: 2rem 0 .6rem; }
table { border-collapse: collapse; margin: .8rem 0 1.4rem; font-size: .9rem;
        font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { border-bottom: 1px solid #d7dce1; padding: .25rem .7rem; text-align: right; }
th:first-child, td:first-child, td.words { text-align: left; }
th { border-bottom: 2px solid #8b949e; vertical-align: bottom; }
figure { margin: 1rem 0 1.6rem; } figure svg { max-width: 100%; height: auto; }
figcaption { font-size: .9rem; color: #57606a; }
pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; }
.scroll { overflow-x: auto; }
"""


def html(title: str, blocks: Sequence[Block]) -> str:
    """The whole page."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Table(head, rows, caption):
            title = f"<caption>{escape(caption)}</caption>" if caption else ""
            top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
            lines = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
            return (
                f'<div class="scroll"><table>{title}<thead><tr>{top}</tr></thead>'
                f"<tbody>{lines}</tbody></table></div>"
            )
        case Figure(_, svg, caption):
            return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _cell(text: str) -> str:
    words = ' class="words"' if text[:1].isalpha() else ""
    return f"<td{words}>{escape(text)}</td>"


def markdown(title: str, blocks: Sequence[Block], *, figures: str = "") -> str:
    """``figures``: folder of the plots relative to the file; empty leaves plots out."""
    parts = [f"# {title}", *(_markdown(block, figures) for block in blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown(block: Block, figures: str) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Code(text):
            return f"```\n{text}\n```"
        case Table(head, rows, caption):
            lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
            lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
            return (f"**{caption}**\n\n" if caption else "") + "\n".join(lines)
        case Figure(name, _, caption):
            return f"![{caption}]({figures}/{name}.svg)\n\n{caption}" if figures else ""


def figures(blocks: Sequence[Block]) -> Mapping[str, str]:
    """Name -> SVG of each plot."""
    return {block.name: block.svg for block in blocks if isinstance(block, Figure)}
