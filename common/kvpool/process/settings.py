"""The settings of a process, from flags (`--num-blocks 4`), variables (`KVPOOL_WORKER_NUM_BLOCKS=4`), a TOML file and defaults. The
first of these that has a value wins."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from .variables import unknown_variables

CONFIG_VARIABLE: Final = "KVPOOL_CONFIG"
TABLES: Final = ("manager", "worker", "up", "ray", "gateway", "client")
"""Tables that a settings file may have."""

S = TypeVar("S", bound="ProcessSettings")

_file_table: ContextVar[Mapping[str, Any]] = ContextVar("_file_table", default={})  # noqa: B039 (never written to)


class SettingsProblem(Exception):
    """The settings cannot be used; the message has one line for each problem."""


class ProcessSettings(BaseSettings):
    """Base class of a process's settings. A subclass sets `env_prefix`, `cli_prog_name` and `table`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )

    table: ClassVar[str]
    """Name of these settings' table in the TOML file."""
    shared_variables: ClassVar[Mapping[str, str]] = {}
    """Variables without the prefix, by field, which set it for all processes at once. A variable with the prefix overrides them."""

    config: Path | None = Field(
        default=None,
        description=f"TOML file with settings, each process in its own table. Flags and variables override it. "
        f"Default: ${CONFIG_VARIABLE}, else none.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources after the flags, in the order of their precedence."""
        shared = {field: os.environ[name] for field, name in cls.shared_variables.items() if os.environ.get(name)}
        return (
            init_settings,
            env_settings,
            InitSettingsSource(settings_cls, shared),
            InitSettingsSource(settings_cls, dict(_file_table.get())),
        )


def load_settings(kind: type[S], arguments: Sequence[str] | None = None) -> S:
    """Load the settings of this process; `arguments` are those of sys.argv without the first, by default.

    Raises SettingsProblem, also for an unknown flag or a misspelt variable; a variable that is not close to any setting is
    reported on stderr and ignored. `--help` ends the process, as in argparse.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if strange := flags_in(split_flags(kind, arguments).others):
        raise SettingsProblem("\n".join(unknown_flag(flag, flags_of(kind)) for flag in strange))
    variables = unknown_variables(
        (name for name, value in os.environ.items() if value), kind.table, kind.model_fields, TABLES
    )
    if variables.misspelt:
        raise SettingsProblem("\n".join(variables.misspelt))
    for line in variables.other:
        print(f"{kind.model_config.get('cli_prog_name')}: {line}", file=sys.stderr)
    path = _config_path(arguments, f"{kind.model_config.get('env_prefix', '')}CONFIG")
    table = {} if path is None else read_tables(path).get(kind.table, {})
    if unknown := table.keys() - (kind.model_fields.keys() - {"config"}):
        raise SettingsProblem("\n".join(_unknown(kind, path, name) for name in sorted(unknown)))
    token = _file_table.set(table)
    try:
        source = CliSettingsSource[Any](kind, formatter_class=_HelpFormatter)
        return CliApp.run(kind, arguments, cli_settings_source=source)
    except ValidationError as error:
        problems = [problem for problem in error.errors() if problem["type"] != "default_factory_not_called"]
        raise SettingsProblem("\n".join(_say(kind, arguments, path, table, problem) for problem in problems)) from None
    except SettingsError as error:
        raise SettingsProblem(str(error)) from None
    finally:
        _file_table.reset(token)


def state_home() -> Path:
    """Return the default folder for state that outlives processes."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvpool"


class SplitFlags(NamedTuple):
    """Arguments of a command line in two lists, each in their order."""

    own: list[str]
    """Flags of the settings, each with its value."""
    others: list[str]
    """All other arguments."""


def split_flags(kind: type[ProcessSettings], arguments: Sequence[str], without: Collection[str] = ()) -> SplitFlags:
    """Take the flags of these settings out of a command line, except for the flags `without`."""
    takes_value = dict.fromkeys({*flags_of(kind), "-h"} - set(without), False)
    for name, field in kind.model_fields.items():
        if field.annotation is not bool and _flag(name) in takes_value:
            takes_value[_flag(name)] = True
    split = SplitFlags([], [])
    wants_value = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        is_own = wants_value or flag in takes_value
        (split.own if is_own else split.others).append(argument)
        wants_value = not wants_value and not equals and takes_value.get(flag, False)
    return split


def flags_of(kind: type[ProcessSettings]) -> set[str]:
    """Return the long flags of these settings, `--help` included."""
    negative = {_flag(f"no_{name}") for name, field in kind.model_fields.items() if field.annotation is bool}
    return {*map(_flag, kind.model_fields), *negative, "--help"}


def flags_in(arguments: Sequence[str]) -> list[str]:
    """List the flags in a command line, without their values."""
    return [argument.partition("=")[0] for argument in arguments if argument.startswith("--") and argument != "--"]


def unknown_flag(flag: str, flags: Collection[str]) -> str:
    """Say that a flag does not exist, with the closest flag that does."""
    return f"there is no flag {flag}" + (_meant(flag, sorted(flags)) or "; --help lists them")


def _meant(name: str, known: Iterable[str], form: str = "{}") -> str:
    """Ask whether the closest known name is meant; empty: none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {form.format(close[0])}?" if close else ""


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """Read the tables of a settings file. Raises SettingsProblem."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsProblem(f"the settings file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsProblem(f"the settings file {path} is not TOML: {error}") from None
    if strange := [name for name, value in tables.items() if isinstance(value, dict) and name not in TABLES]:
        hint = _meant(strange[0], TABLES, "[{}]") or f": there are {', '.join(f'[{name}]' for name in TABLES)}"
        raise SettingsProblem(f"[{strange[0]}] in {path} is no table that kvpool reads{hint}")
    if loose := [name for name, value in tables.items() if not isinstance(value, dict)]:
        raise SettingsProblem(
            f"{loose[0]!r} in {path} is in no table: put it below one of {', '.join(f'[{name}]' for name in TABLES)}"
        )
    return tables


def _config_path(arguments: Sequence[str], own_variable: str) -> Path | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        given = parser.parse_known_args(arguments)[0].config
    except argparse.ArgumentError:
        return None  # `--config` without a file: the real parser says so
    given = given or os.environ.get(own_variable) or os.environ.get(CONFIG_VARIABLE)
    return Path(given).expanduser() if given else None


def _unknown(kind: type[ProcessSettings], path: Path | None, name: str) -> str:
    hint = _meant(name.replace("-", "_"), kind.model_fields.keys() - {"config"}, "{!r}")
    return f"{name!r} in [{kind.table}] of {path} is no setting{hint}"


def _say(
    kind: type[ProcessSettings],
    arguments: Sequence[str],
    path: Path | None,
    table: Mapping[str, Any],
    problem: Any,
) -> str:
    """Describe an error, with the flag, variable or file that set the value first."""
    message: str = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    field = str(problem["loc"][0])
    flag, negative = _flag(field), _flag(f"no_{field}")
    variable = f"{kind.model_config.get('env_prefix', '')}{field}".upper()
    shared = kind.shared_variables.get(field, "")
    if any(argument.split("=")[0] in (flag, negative) for argument in arguments):
        place = flag
    elif os.environ.get(variable):
        place = variable
    elif os.environ.get(shared):
        place = shared
    elif field in table:
        place = f"{field} in [{kind.table}] of {path}"
    else:
        place = flag
    if "Secret" in str(kind.model_fields[field].annotation):
        return f"{place}: {message}"  # it goes to a terminal or a log
    return f"{place}: {message}, got {problem['input']!r}"


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves out defaults that are None or a function: the description states those."""

    def add_text(self, text: str | None) -> None:
        super().add_text(text and inspect.cleandoc(text))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return re.sub(r"\s*\((default: null|default factory: .*)\)", "", action.help or "") or None
