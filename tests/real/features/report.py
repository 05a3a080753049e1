"""The compatibility table, from what was measured."""

from __future__ import annotations

from dataclasses import dataclass

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


def page(cells: list[Cell]) -> str:
    """Markdown: one table a route, one row a feature."""
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
        "answers were compared field by field (ids, times and fingerprints aside; "
        "log-probabilities to 0.002). *same* means no field differed; what follows says where the "
        "history came from, or why one worker did it all.\n\n"
        f"{len(cells)} answers, {different} different.\n"
    ]
    for route, rows in routes.items():
        parts.append(f"\n## `{route}`\n\n| feature | whole answer | streamed |\n|---|---|---|")
        for feature, row in rows.items():
            whole, streamed = (row[kind].words if kind in row else "-" for kind in (False, True))
            parts.append(f"| {feature} | {whole} | {streamed} |")
    parts.append("\n## Routes that one worker answers\n\n| route | |\n|---|---|")
    parts += [f"| `{cell.case.route}` | {cell.words} |" for cell in alone]
    return "\n".join(parts) + "\n"
