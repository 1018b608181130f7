"""Finds `KVPOOL_*` variables that no process reads, most often because they are misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

PREFIX: Final = "KVPOOL_"
_SHARED: Final = ("KVPOOL_CACHE_DIR", "KVPOOL_CONFIG", "KVPOOL_MANAGER")
"""Variables that several processes read."""
_OF_COMPOSE: Final = (
    "KVPOOL_ADVERTISE_HOST", "KVPOOL_BIND", "KVPOOL_BUILD_NETWORK", "KVPOOL_DTYPE", "KVPOOL_FIND_LINKS",
    "KVPOOL_KV_CACHE_MEMORY", "KVPOOL_MODEL", "KVPOOL_MODELS", "KVPOOL_NAME",
    "KVPOOL_REMOTE_MANAGER", "KVPOOL_TAG", "KVPOOL_THREADS", "KVPOOL_TORCH_INDEX",
)  # fmt: skip
"""Variables that docker-compose.yml reads; a shell that has them runs the other commands too."""
_PREFIXES_OF_COMPOSE: Final = ("KVPOOL_CPUS_", "KVPOOL_GPU_", "KVPOOL_MEMORY_", "KVPOOL_PORT_")
_PREFIXES_OF_TESTS: Final = ("KVPOOL_COMPOSE_", "KVPOOL_TEST_")
_CUTOFF: Final = 0.8
"""Least similarity of a misspelt name: two exchanged letters in a word of seven have 0.86."""


class UnknownVariables(NamedTuple):
    """Messages about variables that are set and that nothing reads, one for each."""

    misspelt: list[str]
    """Messages about variables that are close to a known name, with that name."""
    other: list[str]


def unknown_variables(
    names: Iterable[str], table: str, fields: Collection[str], tables: Collection[str]
) -> UnknownVariables:
    """Look through the `names` of the environment for one process, whose settings are `fields` under the prefix KVPOOL_TABLE_.

    Variables of other processes (`tables`) are theirs to check.
    """
    unknown = UnknownVariables([], [])
    for name in sorted(name for name in names if name.startswith(PREFIX)):
        words = name.removeprefix(PREFIX)
        owner = next((other for other in tables if words.startswith(f"{other.upper()}_")), None)
        if owner == table:
            meant = {f"{PREFIX}{table}_{field}".upper(): field.upper() for field in fields}
            _judge(name, words.removeprefix(f"{table.upper()}_"), meant, unknown)
        elif owner is None and not name.startswith((*_PREFIXES_OF_COMPOSE, *_PREFIXES_OF_TESTS)):
            rest = words.partition("_")[2]
            meant = {variable: variable.removeprefix(PREFIX) for variable in (*_SHARED, *_OF_COMPOSE)}
            meant |= {f"{PREFIX}{other.upper()}_{rest}": f"{other.upper()}_{rest}" for other in tables if rest}
            _judge(name, words, meant, unknown)
    return unknown


def _judge(name: str, words: str, meant: Mapping[str, str], unknown: UnknownVariables) -> None:
    """Add a message about the variable unless it is a known name, a key of `meant`. `words` is compared with the values of
    `meant`."""
    if name in meant:
        return
    close = difflib.get_close_matches(words, meant.values(), n=1, cutoff=_CUTOFF)
    if close:
        variable = next(variable for variable, value in meant.items() if value == close[0])
        unknown.misspelt.append(f"no setting is called {name}; did you mean {variable}?")
    else:
        unknown.other.append(f"no setting is called {name}: the variable is ignored")
