"""A mutant as a file: a header that says what it stands for, and a unified diff. Read and applied without fuzz.

The diff's line numbers are ignored: what a hunk takes away must stand in the file exactly once, with its context. So a mutant
outlives changes elsewhere in its file, and never lands in another place than was meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_REQUIRED = ("Mutant", "Mistake", "Seen in", "Breaks")
_OPTIONAL = ("Tests",)


class PatchError(Exception):
    """The file is no mutant, or its diff does not apply; the message says what to do."""


@dataclass(frozen=True)
class Hunk:
    """One change: the lines as they are in the file, and as they become."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Mutant:
    """One mistake that the tests must see."""

    name: str
    what: str
    """What the code does instead."""
    mistake: str
    """The mistake that it stands for."""
    seen_in: str
    """Where the mistake was made before; "our own" if we only thought of it."""
    breaks: str
    """The rule that is broken."""
    tests: tuple[str, ...]
    """What pytest runs instead of `killers.TESTS`; the cheapest that see the mistake."""
    hunks: tuple[Hunk, ...]

    @property
    def paths(self) -> list[str]:
        return list(dict.fromkeys(hunk.path for hunk in self.hunks))


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.patch"))


def read(name: str) -> Mutant:
    """The mutant of that name. Raises PatchError."""
    path = FOLDER / f"{name}.patch"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PatchError(f"there is no mutant {name!r}; there are: {', '.join(names())}") from None
    return parse(name, text)


def parse(name: str, text: str) -> Mutant:
    """The text of a patch file as a mutant. Raises PatchError."""
    head, separator, diff = text.partition("\n\n")
    fields: dict[str, str] = {}
    for line in head.splitlines():
        key, colon, value = line.partition(":")
        if not colon or key not in (*_REQUIRED, *_OPTIONAL) or not value.strip() or key in fields:
            raise PatchError(_of_header(name, f"has the line {line!r}"))
        fields[key] = value.strip()
    missing = [key for key in _REQUIRED if key not in fields]
    if missing or not separator:
        raise PatchError(_of_header(name, f"lacks {', '.join(missing) or 'an empty line and a diff behind it'}"))
    hunks = tuple(_hunks(name, diff))
    if not hunks:
        raise PatchError(
            f"{name}.patch has no diff behind its header: what `git diff` shows of the mistake belongs there"
        )
    what, mistake, seen_in, breaks = (fields[key] for key in _REQUIRED)
    return Mutant(name, what, mistake, seen_in, breaks, tuple(fields.get("Tests", "").split()), hunks)


def _of_header(name: str, why: str) -> str:
    return (
        f"the header of {name}.patch {why}; it needs one line each of {', '.join(f'`{key}: …`' for key in _REQUIRED)}, may have "
        "`Tests: …` (arguments of pytest), and ends with an empty line"
    )


def _hunks(name: str, diff: str) -> list[Hunk]:
    hunks: list[Hunk] = []
    path = ""
    before: list[str] = []
    after: list[str] = []

    def close() -> None:
        if before or after:
            hunks.append(Hunk(path, "".join(before), "".join(after)))
        before.clear()
        after.clear()

    for line in diff.splitlines(keepends=True):
        if line.startswith(("diff --git ", "index ", "--- ", "+++ ", "@@")):
            close()
            if line.startswith("+++ "):
                path = line[4:].strip().removeprefix("b/")
        elif line[0] in " -+" and path:
            if line[0] != "+":
                before.append(line[1:])
            if line[0] != "-":
                after.append(line[1:])
        else:
            raise PatchError(f"{name}.patch has a line that is not of a unified diff: {line!r}")
    close()
    return hunks


def mutated(mutant: Mutant, root: Path) -> dict[str, str]:
    """The files that it changes, under `root`, as they become. Raises PatchError; writes nothing."""
    texts: dict[str, str] = {}
    for hunk in mutant.hunks:
        if hunk.path not in texts:
            try:
                texts[hunk.path] = (root / hunk.path).read_text(encoding="utf-8")
            except FileNotFoundError:
                raise PatchError(_moved_on(mutant, f"there is no {hunk.path}")) from None
        count = texts[hunk.path].count(hunk.before)
        if count != 1:
            where = "is not there any more" if not count else f"stands there {count} times"
            raise PatchError(_moved_on(mutant, f"what it changes in {hunk.path} {where}:\n{hunk.before}"))
        texts[hunk.path] = texts[hunk.path].replace(hunk.before, hunk.after)
    return texts


def _moved_on(mutant: Mutant, why: str) -> str:
    return (
        f"{mutant.name}.patch does not apply: {why}\nThe code has moved on. If the mistake can still be made ({mutant.what}), make "
        f"it by hand, put what `git diff` shows behind the header of tests/mutants/{mutant.name}.patch, undo it, and see that "
        f"`python -m tests.mutants {mutant.name}` kills it. If it cannot be made any more, delete the patch and say so in the "
        "commit."
    )
