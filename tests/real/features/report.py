"""The compatibility table, from what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.real.features.cases import Case


@dataclass(frozen=True)
class Cell:
    """One measured answer."""

    case: Case
    streamed: bool
    status: int
    route: str
    reason: str
    reused: int
    different: bool

    @property
    def words(self) -> str:
        if self.different and not (self.case.route == "/v1/messages" and self.status >= 400):
            return "DIFFERENT"
        if self.status >= 400:
            return f"same {self.status}"
        if self.route == "prefill-with-pull":
            return f"same, {self.reused} tokens from decode"
        if self.route == "one worker":
            return "same"
        return f"same, {self.route} ({self.reason})"


@dataclass(frozen=True)
class Company:
    """How many of a plain worker's answers changed when ``at_once`` requests shared it."""

    at_once: int
    answers: int
    adapters: bool
    """Was every sixth request for a LoRA adapter?"""
    changed: int
    changed_of_adapter: int

    @property
    def words(self) -> str:
        among = "with one in six for a LoRA adapter" if self.adapters else "without adapters"
        of_them = f" ({self.changed_of_adapter} of them the adapter's)" if self.changed else ""
        return f"{among}, {self.changed} of {self.answers} changed{of_them}"


@dataclass
class Results:
    """What a run has measured so far."""

    cells: list[Cell]
    company: list[Company] = field(default_factory=list)


def page(results: Results) -> str:
    """Markdown: one table a route, one row a feature."""
    cells = results.cells
    routes: dict[str, dict[str, dict[bool, Cell]]] = {}
    alone: list[Cell] = []
    for cell in cells:
        if cell.route == "one worker":
            alone.append(cell)
        else:
            rows = routes.setdefault(cell.case.route, {})
            rows.setdefault(cell.case.feature, {})[cell.streamed] = cell
    different = sum(cell.words == "DIFFERENT" for cell in cells)
    parts = [
        "# Compatibility\n\nEach cell was measured on a real pair by `make features`: the second "
        "turn of a conversation went through kvloop and to one plain vLLM 0.32.0 worker, and the "
        "answers were compared field by field (ids, times, fingerprints and, in streams, the count "
        "of reasoning tokens aside; log-probabilities to 0.002). *same* means no field differed; "
        "what follows says where the history came from, or why one worker did it all. A refusal "
        "that the plain worker tells inside a stream counts as the refusal that it is; kvloop "
        "answers it with its status.\n\n"
        f"{len(cells)} answers, {different} different.\n"
    ]
    for route, rows in routes.items():
        parts.append(f"\n## `{route}`\n\n| feature | whole answer | streamed |\n|---|---|---|")
        for feature, row in rows.items():
            whole, streamed = (row[kind].words if kind in row else "-" for kind in (False, True))
            parts.append(f"| {feature} | {whole} | {streamed} |")
    parts.append("\n## Routes that one worker answers\n\n| route | |\n|---|---|")
    for cell in alone:
        what = f" ({cell.case.feature})" if cell.case.feature else ""
        parts.append(f"| `{cell.case.route}`{what} | {cell.words} |")
    if results.company:
        parts.append(
            "\n## Why the cases run one at a time\n\n"
            "The plain worker alone, without kvloop, asked for the same whole answers one by one "
            f"and {results.company[0].at_once} at a time: "
            + "; ".join(each.words for each in results.company)
            + "."
        )
        if any(each.adapters and each.changed for each in results.company):
            parts.append(
                "\nThe cause is vLLM's: its CPU operators take the index -1, which marks a token "
                "of the base model, for the last adapter in memory (`vllm/lora/ops/torch_ops`; "
                "vllm#48421, not merged). One batch with an adapter's request gives every base "
                "model's request in it the adapter. Through kvloop the same happens, because its "
                "workers are vLLM: do not mix the two on CPU workers. "
                "The Triton kernels of GPUs skip such tokens."
            )
    return "\n".join(parts) + "\n"


BEGIN, END = "<!-- compatibility -->\n", "<!-- end of compatibility -->\n"
"""Around the README's table."""


def summary(page_text: str) -> str:
    """The README's table, from the page: features down, routes across."""
    routes: list[str] = []
    rows: dict[str, dict[str, str]] = {}
    for line in page_text.split("\n## Routes that one worker")[0].splitlines():
        if line.startswith("## `"):
            routes.append(line.removeprefix("## `").removesuffix("`"))
        elif routes and line.startswith("| ") and not line.startswith("| feature"):
            feature, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
            rows.setdefault(feature, {})[routes[-1]] = _short(cells)
    head = " | ".join(f"`{route}`" for route in routes)
    lines = [f"| feature | {head} |", "|---" * (len(routes) + 1) + "|"]
    for feature, row in rows.items():
        lines.append(f"| {feature} | " + " | ".join(row.get(route, "") for route in routes) + " |")
    return "\n".join(lines) + "\n"


def _short(cells: list[str]) -> str:
    """One word for both kinds of answer, or for each."""
    words = [_word(cell) for cell in cells if cell != "-"]
    return words[0] if len(set(words)) == 1 else ", streamed: ".join(words)


def _word(cell: str) -> str:
    if "from decode" in cell:
        return "reuse"
    if "decode-only" in cell:
        return "one worker"
    if "cold-prefill" in cell:
        return "P/D"
    return cell


def put_into(readme: str, page_text: str) -> str:
    """The README with its table made anew."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + summary(page_text) + END + after
