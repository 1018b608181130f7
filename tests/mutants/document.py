"""The table of mutants in docs/TESTING.md, between two markers."""

from __future__ import annotations

from tests.mutants.patch import Mutant
from tests.mutants.tree import ROOT

PAGE = ROOT / "docs" / "TESTING.md"
BEGIN = "<!-- mutants: begin (written by `python -m tests.mutants --write`) -->"
END = "<!-- mutants: end -->"


def table(killed: list[tuple[Mutant, str]]) -> str:
    """Rows of mutants and what killed each."""
    rows = ["| mutant | the mistake | seen in | breaks | killed by |", "|---|---|---|---|---|"]
    for mutant, by in killed:
        cells = (f"`{mutant.name}`: {mutant.what}", mutant.mistake, mutant.seen_in, mutant.breaks, by)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def names_in(page: str) -> list[str]:
    """The mutants that the page lists."""
    begin, end = page.index(BEGIN), page.index(END)
    return [line.split("`")[1] for line in page[begin:end].splitlines() if line.startswith("| `")]


def write(killed: list[tuple[Mutant, str]]) -> None:
    """Replace what is between the markers."""
    page = PAGE.read_text(encoding="utf-8")
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{before}\n{table(killed)}\n{after}", encoding="utf-8")
