"""The table of mutants in RESULTS.md, between two markers."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.patch import Mutant

PAGE = Path(__file__).parent / "RESULTS.md"
BEGIN = "<!-- mutants: begin (written by `python -m tests.mutants --write`) -->"
END = "<!-- mutants: end -->"


HEAD = ["| mutant | the mistake | seen in | breaks | killed by |", "|---|---|---|---|---|"]


def row(mutant: Mutant, by: str) -> str:
    """One mutant and what killed it."""
    cells = (f"`{mutant.name}`: {mutant.what}", mutant.mistake, mutant.seen_in, mutant.breaks, by)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def rows_of(page: str) -> dict[str, str]:
    """The rows of the page, by the name of their mutant."""
    begin, end = page.index(BEGIN), page.index(END)
    return {line.split("`")[1]: line for line in page[begin:end].splitlines() if line.startswith("| `")}


def write(killed: list[tuple[Mutant, str]], names: list[str]) -> None:
    """Put the rows of the mutants killed between the markers; the others of `names` keep the rows that they have."""
    page = PAGE.read_text(encoding="utf-8")
    rows = rows_of(page) | {mutant.name: row(mutant, by) for mutant, by in killed}
    table = "\n".join([*HEAD, *(rows[name] for name in names if name in rows)])
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{before}\n{table}\n{after}", encoding="utf-8")
