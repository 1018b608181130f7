"""`kvpool ray up`: its settings, and the command lines of the processes. tests/on_ray runs it on real nodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvpool.cli.commands import ray as ray_command
from kvpool.cli.on_ray.plan import RayPlan, make_plan, mark_folder, problem_of_disk
from kvpool.cli.on_ray.settings import FLAGS, RaySettings
from kvpool.client.errors import InvalidRequest
from kvpool.process.settings import SettingsProblem, load_settings
from tests.client.commands import exit_status


def settings(*arguments: str) -> RaySettings:
    return load_settings(RaySettings, arguments)


def plan(
    *arguments: str, has_gpus: bool = False, mark: str = "", environment: Mapping[str, str] | None = None
) -> RayPlan:
    own, of_workers = FLAGS.split(arguments)
    return make_plan(settings(*own), of_workers, has_gpus=has_gpus, mark=mark, environment=environment or {})


def value(command: list[str], flag: str) -> str:
    """The last one, as the process takes it."""
    return command[len(command) - command[::-1].index(flag)]


def test_a_manager_is_alone_unless_an_election_is_shared() -> None:
    assert settings().num_managers == 1
    assert settings("--state-dir", "/shared").num_managers == 2
    assert settings("--election", "kubernetes:a/b").num_managers == 2
    assert settings("--state-dir", "/shared", "--managers", "3").num_managers == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--managers", "2"], "--managers 2 need an election: give --state-dir"),
        (["--election", "file"], "--election file needs --state-dir"),
        (["--election", "etcd:a"], "--election"),
        (["--state-dir", "/s", "--port", "65535"], "2 managers need as many ports"),
        (["--namespace", "a b"], "--namespace"),
        (["--workers", "0"], "--workers"),
        (["--gpus-per-worker", "2"], "--gpus-per-worker"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsProblem) as caught:
        settings(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("flag", ["--manager", "--worker-id", "--host", "--advertise", "--device", "--dry-run"])
def test_flags_of_the_workers_that_it_sets_are_refused(flag: str) -> None:
    with pytest.raises(SettingsProblem, match=f"kvpool ray up sets {flag} of its workers: "):
        FLAGS.split(["--workers", "2", flag, "1"])


def test_each_process_listens_on_its_node_and_finds_the_managers_in_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = plan("--workers", "2", "--http", "8000", "--namespace", "pool", "--", "--model", "m", "--port", "7")
    (manager,) = made.managers
    assert made.gateway is not None
    own = tmp_path / "kvpool" / "ray" / "pool"

    command = manager.command("10.0.0.1", 50051)
    assert (value(command, "--host"), value(command, "--port")) == ("10.0.0.1", "50051")
    assert value(command, "--state-dir") == str(own / "manager-0" / "state")
    assert value(command, "--election") == "file"  # its successor on this node waits for its end

    for spec, name in zip(made.workers, ["worker-0", "worker-1"], strict=True):
        command = spec.command("10.0.0.2", 0)
        assert (value(command, "--worker-id"), value(command, "--host")) == (name, "10.0.0.2")
        assert value(command, "--manager") == f"file:{own / name / 'managers'}"
        assert (value(command, "--device"), value(command, "--model"), value(command, "--port")) == ("cpu", "m", "7")

    command = made.gateway.command("10.0.0.3", 8000)
    assert (value(command, "--host"), value(command, "--port")) == ("10.0.0.3", "8000")
    assert value(command, "--manager") == f"file:{own / 'gateway' / 'managers'}"


def test_managers_share_the_folder_and_have_ports_next_to_each_other(tmp_path: Path) -> None:
    made = plan("--state-dir", str(tmp_path), "--port", "600", mark="abc")
    assert [spec.port for spec in made.managers] == [600, 601]
    for spec in made.managers:
        assert spec.mark == "abc"
        assert value(spec.command("h", spec.port), "--state-dir") == str(tmp_path)
    assert [spec.port for spec in plan("--state-dir", "/s", "--port", "0").managers] == [0, 0]


def test_a_manager_starts_only_in_the_folder_that_the_others_have(tmp_path: Path) -> None:
    """The same path on a node that has not mounted the disk is another folder, with an epoch of its own."""
    folder = tmp_path / "shared"
    mark = mark_folder(folder)
    assert mark_folder(folder) == mark
    (manager, _) = plan("--state-dir", str(folder), mark=mark).managers
    assert problem_of_disk(manager, "10.0.0.1") == ""
    folder.rename(tmp_path / "mounted elsewhere")
    assert "No such file" in problem_of_disk(manager, "10.0.0.1")
    assert mark_folder(folder) != mark
    assert "mount the disk that all nodes share on 10.0.0.1" in problem_of_disk(manager, "10.0.0.1")
    assert problem_of_disk(plan().managers[0], "10.0.0.1") == ""
    with pytest.raises(InvalidRequest, match="Not a directory"):
        mark_folder(folder / "shared" / "below a file")


def test_a_lease_keeps_the_epoch_by_itself() -> None:
    made = plan("--election", "kubernetes:default/kvpool")
    assert [spec.state_dir for spec in made.managers] == ["", ""]
    assert value(made.managers[0].command("h", 1), "--election") == "kubernetes:default/kvpool"


def test_workers_have_a_gpu_each_where_there_are_any() -> None:
    assert [plan(has_gpus=has).worker_gpus for has in (False, True)] == [0, 1]
    assert plan("--gpus-per-worker", "0", has_gpus=True).worker_gpus == 0
    assert value(plan(has_gpus=True).workers[0].command("h", 0), "--device") == "cuda:0"


def test_variables_of_the_command_are_those_of_the_processes() -> None:
    given = {"KVPOOL_WORKER_NUM_BLOCKS": "4", "KVPOOL_RAY_WORKERS": "2", "KVPOOL_MANAGER": "a:1", "HOME": "/h"}
    assert plan(environment=given).workers[0].variables == {"KVPOOL_WORKER_NUM_BLOCKS": "4"}


def test_what_all_starts_of_a_cluster_share_leaves_out_how_many_workers() -> None:
    before = plan("--workers", "1", "--model", "m")
    assert (
        plan("--workers", "5", "--model", "m", "--http", "8000", "--detach").managers[0].record
        == before.managers[0].record
    )
    for other in (["--model", "n"], ["--model", "m", "--port", "1"], ["--model", "m", "--cpus-per-worker", "2"]):
        assert plan(*other).managers[0].record != before.managers[0].record


@pytest.mark.parametrize("arguments", [["up"], ["down"], ["status"], ["status", "--json"]])
def test_without_ray_it_says_what_to_install(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_command, "find_spec", lambda name: None)
    assert exit_status(["ray", *arguments]) == 1
    said = capsys.readouterr()
    assert "pip install 'kvpool[ray]'" in said.err
    assert said.out == ""


def test_nothing_else_imports_ray() -> None:
    """It takes a second, and hundreds of megabytes that most do not need."""
    assert "ray" not in sys.modules
