"""Write the generated documents: python -m scripts.docs."""

from __future__ import annotations

from pathlib import Path

from scripts.dashboard import document as dashboard

from .api import document
from .pictures import pictures

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> None:
    """Write docs/API.md, docs/images and the dashboard of deploy/grafana."""
    (DOCS / "API.md").write_text(document(), encoding="utf-8")
    for name, picture in pictures().items():
        (DOCS / "images" / name).write_text(picture, encoding="utf-8")
    dashboard.FILE.write_text(dashboard.document(), encoding="utf-8")


if __name__ == "__main__":
    main()
