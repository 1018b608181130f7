"""The Dockerfile without an engine: its stages, and what must hold for those that become images."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from typing import NamedTuple

_CONTINUED = re.compile(r"\\\n")
_COMMENT = re.compile(r"^\s*#.*\n?", re.MULTILINE)
_OF_ONE_MACHINE = re.compile(r"(?:file:/|/(?:home|Users|mnt|media|work)/)\S*")
_BUILD_TOOLS = re.compile(r"\b(?:pip|apt-get|apt|apk|make|gcc|curl|wget)\b")
_VARIABLE = re.compile(r"(\w+)=(\S+)")
COMPILER = frozenset({"gcc", "libc6-dev"})
"""What Triton needs in an image to compile the launchers of its kernels, as Debian's packages."""


class Instruction(NamedTuple):
    """`RUN make` → ("RUN", "make")."""

    word: str
    rest: str


class Stage(NamedTuple):
    """From one FROM to the next."""

    name: str
    base: str
    instructions: list[Instruction]

    def last(self, *words: str) -> Instruction | None:
        """The last instruction with one of these words: the one that counts."""
        found = [instruction for instruction in self.instructions if instruction.word in words]
        return found[-1] if found else None


def stages(text: str) -> list[Stage]:
    """The stages in their order. What stands before the first FROM belongs to none."""
    found: list[Stage] = []
    for line in _CONTINUED.sub(" ", _COMMENT.sub("", text)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            base, _, name = re.sub(r"^--\S+\s+", "", rest.strip()).partition(" ")
            found.append(Stage(re.sub(r"(?i)^as\s+", "", name.strip()), base, []))
        elif word and found:
            found[-1].instructions.append(Instruction(word.upper(), rest.strip()))
    return found


def image(text: str, target: str) -> Stage | None:
    """The stage with all that it takes over from the stages below it; None: there is none of that name."""
    found = {stage.name: stage for stage in stages(text)}
    if target not in found:
        return None
    stage = found[target]
    instructions, base = list(stage.instructions), stage.base
    while base in found:
        instructions[:0] = found[base].instructions
        base = found[base].base
    return Stage(stage.name, base, instructions)


def environment(stage: Stage) -> dict[str, str]:
    """The variables that a container of the image has."""
    lines = [instruction.rest for instruction in stage.instructions if instruction.word == "ENV"]
    return dict(pair for line in lines for pair in _VARIABLE.findall(line))


def problems(text: str, targets: Set[str], compiling: Set[str] = frozenset()) -> Iterator[str]:
    """What is wrong, one line each. `targets`: the stages that become images, `compiling`: those that must have a C compiler."""
    found = {stage.name: stage for stage in stages(text)}
    for target in sorted(targets):
        if (stage := image(text, target)) is not None:
            yield from (f"stage {target} {problem}" for problem in _problems_of_image(stage, target in compiling))
        else:
            yield f"has no stage {target}, which docker-compose.yml builds; there are {', '.join(found)}"
    for match in _OF_ONE_MACHINE.finditer(_COMMENT.sub("", text)):
        yield f"names {match[0]}, which is a path of one machine: pass it as an argument of the build"
    for name in re.findall(r"^(?:ARG \w*IMAGE=|FROM )([^\s$]+)", text, re.MULTILINE):
        if name not in found and name.partition(":")[2] in ("", "latest"):
            yield f"starts from {name}: give it a tag other than latest"
    for stage in found.values():
        for instruction in stage.instructions:
            sources = instruction.rest.split()[:-1]
            if instruction.word == "ADD" or (instruction.word == "COPY" and any(".." in path for path in sources)):
                yield f"stage {stage.name} has {instruction.word} {instruction.rest}: COPY what is in the checkout"


def _problems_of_image(stage: Stage, compiles: bool) -> Iterator[str]:
    user = stage.last("USER")
    if user is None or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user.rest):
        yield f"runs as {user.rest if user else 'root'}: USER with user and group as numbers, and not 0"
    start = stage.last("ENTRYPOINT", "CMD")
    if start is None:
        yield "starts nothing: it needs an ENTRYPOINT"
    compilers = [instruction for instruction in stage.instructions if _installs_compiler(instruction)]
    if compiles and not compilers:
        yield f"has no C compiler, which Triton needs at run time: RUN apt-get install {' '.join(sorted(COMPILER))}"
    for instruction in stage.instructions:
        if compiles and instruction in compilers:
            continue
        if instruction.word in ("ENTRYPOINT", "CMD") and not _is_exec_form(instruction.rest):
            yield f'has {instruction.word} {instruction.rest}: write it as ["program", "argument"]; a shell takes no signals'
        if instruction.word == "RUN" and (tool := _BUILD_TOOLS.search(instruction.rest)):
            yield f"runs {tool[0]}: build in a stage of its own, and copy only the result"


def _installs_compiler(instruction: Instruction) -> bool:
    return (
        instruction.word == "RUN" and "apt-get install" in instruction.rest and {*instruction.rest.split()} >= COMPILER
    )


def _is_exec_form(rest: str) -> bool:
    try:
        words = json.loads(rest)
    except ValueError:
        return False
    return isinstance(words, list) and bool(words) and all(isinstance(word, str) for word in words)
