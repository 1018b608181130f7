"""Settings of a process: flag before variable before file before default, and errors that name the place to mend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kvpool.cache_service.settings import ManagerSettings
from kvpool.process.settings import CONFIG_VARIABLE, TABLES, ProcessSettings, SettingsProblem, load_settings
from kvpool.worker_service.settings import WorkerSettings


class Oven(ProcessSettings):
    model_config = SettingsConfigDict(env_prefix="OVEN_", cli_prog_name="oven")
    table: ClassVar[str] = "oven"
    shared_variables: ClassVar[Mapping[str, str]] = {"place": "KITCHEN"}

    max_degrees: int = Field(default=200, ge=0, le=300, description="In °C.")
    place: str = Field(default="kitchen", description="Where it stands.")
    fan: bool = Field(default=True, description="Whether the air moves.")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.process.settings.TABLES", ("oven", "fridge", *TABLES))
    for name in (CONFIG_VARIABLE, "OVEN_CONFIG", "OVEN_MAX_DEGREES", "OVEN_PLACE", "KITCHEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text('[oven]\nmax_degrees = 100\nplace = "yard"\nfan = false\n\n[fridge]\nice = true\n')
    return path


def problem(*arguments: str) -> str:
    with pytest.raises(SettingsProblem) as caught:
        load_settings(Oven, arguments)
    return str(caught.value)


def test_the_first_of_flag_variable_shared_variable_and_file_wins(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is put on top of the last one, and covers it."""

    def loaded(*arguments: str) -> tuple[int, str]:
        oven = load_settings(Oven, arguments)
        return oven.max_degrees, oven.place

    assert loaded() == (200, "kitchen")
    assert loaded("--config", str(file)) == (100, "yard")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    assert loaded() == (100, "yard")
    assert load_settings(Oven, []).fan is False
    monkeypatch.setenv("KITCHEN", "cellar")
    assert loaded() == (100, "cellar")
    monkeypatch.setenv("OVEN_PLACE", "attic")
    monkeypatch.setenv("OVEN_MAX_DEGREES", "150")
    assert loaded() == (150, "attic")
    assert loaded("--max-degrees", "250", "--place=roof") == (250, "roof")
    monkeypatch.setenv("OVEN_PLACE", "")
    assert loaded() == (150, "cellar"), "an empty variable says nothing"


def test_a_file_is_named_by_the_flag_then_by_the_own_variable_of_the_process_then_by_that_of_all(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each overrides the next, for the process that it is given to alone."""
    for degrees in (1, 2):
        file.with_name(f"{degrees}.toml").write_text(f"[oven]\nmax_degrees = {degrees}\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    assert load_settings(Oven, []).max_degrees == 100
    monkeypatch.setenv("OVEN_CONFIG", str(file.with_name("1.toml")))
    assert load_settings(Oven, []).max_degrees == 1
    assert load_settings(Oven, [f"--config={file.with_name('2.toml')}"]).max_degrees == 2
    assert load_settings(Oven, []).max_degrees == 1
    assert Oven().max_degrees == 200


def test_an_error_names_the_place_of_the_value(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[oven]\nmax_degrees = 301\n")
    said = {
        "--max-degrees": problem("--max-degrees", "301"),
        f"max_degrees in [oven] of {file}": problem("--config", str(file)),
    }
    monkeypatch.setenv("OVEN_MAX_DEGREES", "301")
    said["OVEN_MAX_DEGREES"] = problem()
    for named, message in said.items():
        assert message.startswith(f"{named}: ")
        assert "less than or equal to 300" in message
        assert "301" in message.removeprefix(named)


def test_every_wrong_setting_is_named_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVEN_MAX_DEGREES", "hot")
    file.write_text('[oven]\nfan = "perhaps"\n')
    lines = problem("--config", str(file)).splitlines()
    assert [line.split(":")[0] for line in lines] == ["OVEN_MAX_DEGREES", f"fan in [oven] of {file}"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-degres", "3"], "there is no flag --max-degres; did you mean --max-degrees?"),
        (["--zzz"], "there is no flag --zzz; --help lists them"),
        (["--no-fan", "--max-degrees=3", "--no-fans"], "there is no flag --no-fans; did you mean --no-fan?"),
    ],
)
def test_an_unknown_flag_is_an_error_with_a_guess(arguments: list[str], says: str) -> None:
    assert problem(*arguments) == says


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVPOOL_WORKER_NUM_BLOKCS", "KVPOOL_WORKER_NUM_BLOCKS"),
        ("KVPOOL_WROKER_NUM_BLOCKS", "KVPOOL_WORKER_NUM_BLOCKS"),
        ("KVPOOL_MANGER", "KVPOOL_MANAGER"),
    ],
)
def test_a_misspelt_variable_is_an_error_with_a_guess(name: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")
    with pytest.raises(SettingsProblem, match=f"^no setting is called {name}; did you mean {meant}\\?$"):
        load_settings(WorkerSettings, [])


def test_a_variable_that_is_like_no_setting_is_reported_and_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of other processes are theirs to check; those of docker-compose.yml are no settings of a process."""
    compose = (Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8")
    for name in {*re.findall(r"KVPOOL_[A-Z0-9_]*[A-Z0-9]", compose), "KVPOOL_CLIENT_TIMOUT", "KVPOOL_MANAGER_X"}:
        monkeypatch.setenv(name, "")
        if name not in {f"KVPOOL_WORKER_{field.upper()}" for field in WorkerSettings.model_fields}:
            monkeypatch.setenv(name, "x")
    monkeypatch.setenv("KVPOOL_MANAGER", "127.0.0.1:9")
    monkeypatch.delenv("KVPOOL_CONFIG", raising=False)
    monkeypatch.setenv("KVPOOL_WORKER_COLOUR", "red")
    load_settings(WorkerSettings, [])
    assert capsys.readouterr().err == (
        "kvpool worker: no setting is called KVPOOL_WORKER_COLOUR: the variable is ignored\n"
    )


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        (None, ["the settings file FILE cannot be read: No such file or directory"]),
        ("[oven\n", ["the settings file FILE is not TOML: "]),
        ("[oven]\nplace = '\xff'", ["the settings file FILE is not TOML: "]),
        ("max_degrees = 3\n", ["'max_degrees' in FILE is in no table: put it below one of [oven], "]),
        ("[clinet]\ntimeout = 3\n", ["[clinet] in FILE is no table that kvpool reads; did you mean [client]?"]),
        (
            "[x]\n",
            ["[x] in FILE is no table that kvpool reads: there are [oven], [fridge], [manager], [worker], [up], [ray]"],
        ),
        (
            "[oven]\nmax-degree = 3\nx = 1\n",
            [
                "'max-degree' in [oven] of FILE is no setting; did you mean 'max_degrees'?",
                "'x' in [oven] of FILE is no setting",
            ],
        ),
        ('[oven]\nconfig = "other.toml"\n', ["'config' in [oven] of FILE is no setting"]),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_with_a_guess(
    tmp_path: Path, content: str | None, problems: list[str]
) -> None:
    path = tmp_path / "o.toml"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    lines = problem("--config", str(path)).splitlines()
    for line, beginning in zip(lines, problems, strict=True):
        assert line.startswith(beginning.replace("FILE", str(path))), line


@pytest.mark.parametrize("kind", [ManagerSettings, WorkerSettings])
def test_help_has_every_setting_with_its_default_and_the_table_of_the_file(
    kind: type[ProcessSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(kind, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "default: null" not in text
    assert "factory" not in text
    assert f"[{kind.table}]" in text
    for name, field in kind.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        assert flag in text
        assert field.description
        if field.default is None:
            assert "Default: " in field.description, f"{flag} does not tell its default"
        else:
            assert f"(default: {field.default})" in text


def test_the_services_read_their_tables(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_text('[manager]\nport = 7000\n\n[worker]\nkv_cache_memory = "2GiB"\nmanager = "10.0.0.1:7000"\n')
    assert load_settings(ManagerSettings, ["--config", str(path)]).port == 7000
    worker = load_settings(WorkerSettings, ["--config", str(path)])
    assert (worker.kv_cache_memory, worker.manager) == (2 << 30, "10.0.0.1:7000")


@pytest.mark.parametrize(
    ("advertise", "told"),
    [("box", "box:7"), ("box:9", "box:9"), ("10.0.0.1", "10.0.0.1:7"), ("::1", "[::1]:7"), ("[::1]:9", "[::1]:9")],
)
def test_a_worker_adds_its_port_to_a_host_that_it_advertises(advertise: str, told: str) -> None:
    settings = load_settings(WorkerSettings, ["--host", "0.0.0.0", "--advertise", advertise])
    assert settings.advertised(7) == told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *((["--advertise", a], "--advertise: needed host or host:port") for a in ("box:", "box:x", "box:70000", ":7", "h:1:2")),
        (["--host", "0.0.0.0"], "needs --advertise"),
    ],
)  # fmt: skip
def test_a_worker_needs_an_address_that_others_can_dial(arguments: list[str], says: str) -> None:
    with pytest.raises(SettingsProblem, match=says):
        load_settings(WorkerSettings, arguments)


_NATIVE = "--quantize int8 is for the native step: leave "


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"runtime": "torch"}, f"{_NATIVE}--runtime torch out, or --quantize"),
        ({"attention_backend": "torch"}, f"{_NATIVE}--attention-backend, which is for torch, out, or --quantize"),
        ({"max_num_batched_tokens": 7}, "--max-num-batched-tokens (7) must be at least --max-num-seqs (8)"),
        ({"block_size": 24}, "--block-size must be a power of two, got 24: use 16 or 32"),
    ],
)
def test_settings_of_a_worker_that_do_not_fit_together_are_refused(given: Mapping[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        WorkerSettings(model="m", quantize="int8", max_num_seqs=8, **given)  # type: ignore[arg-type]
