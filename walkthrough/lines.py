"""Lays out lines of a picture: items after a label, in as many lines as they need.

Every mark is a sign, which colours only repeat: without them the picture says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

CHANGED_STYLE: Final = "bold yellow"
EMPTY_SLOT: Final = "·"
_LABEL: Final = 13
"""Columns of the labels on the left."""


def flow(label: str, items: Sequence[Text], width: int, *, gap: int = 1) -> list[Text]:
    """Write the items after a label, in lines of at most `width` columns that begin below the first item."""
    indent = _LABEL if label else 0
    lines = [Text.assemble((f"{label:<{indent}}", "bold"))]
    column = indent
    for number, item in enumerate(items):
        if column > indent and column + gap + item.cell_len > width:
            lines.append(Text(" " * indent))
            column = indent
        elif number:
            lines[-1].append(" " * gap)
            column += gap
        lines[-1].append_text(item)
        column += item.cell_len
    return lines


def marked(block: int, is_new: bool) -> tuple[str, str]:
    """Return a block id with its style; a mark shows that it is new in its place."""
    return (f"*{block}", CHANGED_STYLE) if is_new else (str(block), "bold")
