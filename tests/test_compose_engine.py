"""`make test-compose` takes the engine that answers, else starts and stops a local one, else says what to install."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.compose import engine as engines
from scripts.compose.end_to_end import run
from scripts.compose.engine import NoEngine, build_settings, engine, exported


class Machine:
    """A folder of commands that stands for all that is installed, and a local engine that notes what it is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        (self.bin / "bash").symlink_to(str(shutil.which("bash")))
        self.local_engine = folder / "local-engine.sh"
        self.notes = folder / "notes"
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setattr(engines, "LOCAL_ENGINE", self.local_engine)

    def install_docker(self, answers_to: str) -> None:
        """A `docker` that fails for all but these first arguments, a pattern of the shell."""
        docker = self.bin / "docker"
        docker.write_text(f'#!{self.bin}/bash\ncase "$1" in {answers_to}) exit 0;; esac\nexit 1\n')
        docker.chmod(0o755)

    def offer_local_engine(self, up: str = "echo export DOCKER_HOST=unix:///x.sock") -> None:
        """Not executable, as a file of a folder that is only read may be."""
        self.local_engine.write_text(f'echo "$1" >>{self.notes}\n[ "$1" = down ] || {{ {up}; }}\n')

    @property
    def told(self) -> list[str]:
        return self.notes.read_text().split()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_an_engine_that_answers_is_used_as_it_is(machine: Machine) -> None:
    machine.install_docker("*")
    machine.offer_local_engine()
    with engine() as settings:
        assert settings == {}
    assert not machine.notes.exists()


def test_a_local_engine_is_started_and_stopped(machine: Machine) -> None:
    machine.offer_local_engine()
    with engine() as settings:
        assert settings == {"DOCKER_HOST": "unix:///x.sock", "KVPOOL_BUILD_NETWORK": "host"}
        assert machine.told == ["up"]
    assert machine.told == ["up", "down"]


def test_a_local_engine_is_stopped_whatever_happens(machine: Machine) -> None:
    machine.offer_local_engine()
    with pytest.raises(KeyboardInterrupt), engine():
        raise KeyboardInterrupt
    assert machine.told == ["up", "down"]


def test_a_local_engine_that_does_not_start_is_told_and_cleaned_up(machine: Machine) -> None:
    machine.offer_local_engine("exit 3")
    with pytest.raises(NoEngine, match="status 3"), engine():
        pytest.fail("there is no engine")
    assert machine.told == ["up", "down"]


@pytest.mark.parametrize(
    ("answers_to", "words"),
    [
        (None, "There is no command `docker`"),
        ("--version", "No Docker engine answers"),
        ("--version | version", "Docker has no plugin compose"),
        ("--version | version | compose", "Docker has no plugin buildx"),
    ],
)
def test_without_any_engine_it_says_what_to_install(
    answers_to: str | None, words: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    if answers_to is not None:
        machine.install_docker(answers_to)
    assert run([]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "https://docs.docker.com/engine/install/" in said


def test_what_an_engine_exports_is_understood() -> None:
    script = (
        "export DOCKER_HOST=unix:///run/x.sock DOCKER_CONFIG='/a b'\nexport PIP_FIND_LINKS_URL=http://127.0.0.1:1/\n"
    )
    found = build_settings(exported(f"noise\n{script}"))
    assert found["DOCKER_HOST"] == "unix:///run/x.sock"
    assert found["DOCKER_CONFIG"] == "/a b"
    assert found["KVPOOL_FIND_LINKS"] == "http://127.0.0.1:1/"
    assert (found["KVPOOL_TORCH_INDEX"], found["KVPOOL_BUILD_NETWORK"]) == ("", "host")
    assert "KVPOOL_TORCH_INDEX" not in build_settings({})
