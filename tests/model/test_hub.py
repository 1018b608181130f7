"""Models by hub id: fetched over HTTP from a hub on loopback, found in the cache afterwards, refused with the reason.

The hub's client reads its settings when it is imported, so every case is a process of its own (fresh_imports/).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from pathlib import Path

import pytest

from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.source import hub, resolve
from kvpool.worker_service.model.source.hub import HubId, parse_hub_id
from tests.model.hub_server import SIGNATURE, HubServer, Repo, RunScript, fresh_processes, repo_of
from tests.model.paged import load, quiet
from tests.tiny_models import EOS_TOKEN_ID, make_tiny_model

TOKEN = "hf_thetokenthatnobodymaysee"
CONFIG = {"config.json": b"{}", "tokenizer.json": b"{}", "chat_template.jinja": b"{}"}
WEIGHTS = {"model.safetensors": bytes(range(256)) * 400}
SHARDS = {
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
    "model-1.safetensors": b"1" * 1000,
    "model-2.safetensors": b"2" * 1000,
}

FETCH = """
import logging, sys
from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.source.hub import fetch_model, parse_hub_id
if "debug" in sys.argv:
    logging.basicConfig(level=logging.DEBUG)
try:
    print("path:", fetch_model(parse_hub_id(sys.argv[1]), print))
except ModelError as error:
    print("error:", error)
"""


@pytest.fixture
def server() -> Iterator[HubServer]:
    """With a model that can be loaded, org/name."""
    with closing(HubServer()) as running:
        running.repos["org/name"] = Repo({**CONFIG, **WEIGHTS})
        yield running


class Machine:
    """A machine with a hub cache of its own, whose processes talk to one hub."""

    def __init__(self, home: Path, url: str, run: RunScript) -> None:
        self.home, self._run = home, run
        self._variables = {"HOME": str(home), "HF_HOME": str(home / "hf"), "HF_ENDPOINT": url}

    def process(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self._run(script, *arguments, **{"PATH": os.environ["PATH"], **self._variables, **environment})

    def run(self, hub_id: str, **environment: str) -> str:
        """What a fetch prints; nothing may be on stderr."""
        done = self.process(FETCH, hub_id, **environment)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def fetch(self, hub_id: str, **environment: str) -> Path:
        """The path that a successful fetch ends with."""
        return _path(self.run(hub_id, **environment))

    def refusal(self, hub_id: str, **environment: str) -> str:
        """The message of a fetch that fails."""
        last = self.run(hub_id, **environment).splitlines()[-1]
        assert last.startswith("error: "), last
        return last.removeprefix("error: ")


def _path(output: str) -> Path:
    last = output.splitlines()[-1]
    assert last.startswith("path: "), last
    return Path(last.removeprefix("path: "))


@pytest.fixture(scope="module")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunScript]:
    with fresh_processes(tmp_path_factory.mktemp("printed")) as run:
        yield run


@pytest.fixture
def machine(server: HubServer, tmp_path: Path, run_script: RunScript) -> Machine:
    return Machine(tmp_path / "machine", server.url, run_script)


def test_what_is_a_hub_id() -> None:
    assert (HubId("org/name", "main").name, HubId("org/name", "v1").name) == ("org/name", "org/name@v1")
    assert parse_hub_id("org/name") == ("org/name", "main")
    assert parse_hub_id("org/na.me-1B") == ("org/na.me-1B", "main")
    assert parse_hub_id("org/name@v1.0") == ("org/name", "v1.0")
    assert parse_hub_id("org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    paths = ("name", "/org/name", "./org/name", "../name", "~/name", "org/name/", "a/b/c", "org/x.gguf", "org/na me")
    assert not [path for path in paths if parse_hub_id(path) is not None]


@pytest.mark.slow
def test_a_model_from_the_hub_runs(
    server: HubServer, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the folder that it was made of: test_truth.py has the texts of these."""
    tiny = make_tiny_model("llama", tmp_path / "tiny", tokenizer=True, eos_token_id=EOS_TOKEN_ID)
    server.repos["org/tiny"] = repo_of(tiny.path)
    expected = load(tiny.path)
    output = machine.run("org/tiny")
    assert "fetched org/tiny in" in output
    monkeypatch.setattr(resolve, "fetch_model", lambda *_: _path(output))
    loaded = load(Path("org/tiny"), cache_dir=tmp_path)
    assert loaded.facts.model_name == "org/tiny"
    assert loaded.facts.model_fingerprint == expected.facts.model_fingerprint
    assert loaded.files == expected.files


def test_only_what_is_loaded_is_fetched_and_once(server: HubServer, machine: Machine) -> None:
    other = dict.fromkeys(
        ("pytorch_model.bin", "consolidated.safetensors", "modeling_x.py", "README.md", "model-q4.gguf"), b"never"
    )
    server.repos["org/name"] = Repo({**CONFIG, **WEIGHTS, **other})
    output = machine.run("org/name")
    path = _path(output)
    assert {file.name for file in path.iterdir()} == {*CONFIG, *WEIGHTS}
    assert sorted(server.fetched()) == sorted([*CONFIG, *WEIGHTS])
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {**CONFIG, **WEIGHTS}
    assert f"asking {server.url} for org/name" in output
    assert "fetching 1 of 1 weights files of org/name" in output
    assert "0.1 MB" in output
    server.requests.clear()
    again = machine.run("org/name")
    assert (_path(again), server.fetched()) == (path, [])
    assert "nothing to fetch" in again


@pytest.mark.parametrize("files", [WEIGHTS, SHARDS, {"model.gguf": b"GGUF"}], ids=["one file", "shards", "gguf"])
def test_without_the_hub_the_cached_copy_is_used_and_said_so(
    files: dict[str, bytes], server: HubServer, machine: Machine
) -> None:
    server.repos["org/name"] = Repo({**CONFIG, **files})
    path = machine.fetch("org/name")
    used = f"Using the cached copy of org/name, commit {server.repos['org/name'].sha[:12]}"

    def fetch_again(reason: str, **environment: str) -> None:
        output = machine.run("org/name", **environment)
        assert _path(output) == path
        assert used in output
        assert reason in output

    server.requests.clear()
    fetch_again("HF_HUB_OFFLINE", HF_HUB_OFFLINE="1")
    assert server.requests == []
    server.status = HTTPStatus.SERVICE_UNAVAILABLE
    fetch_again("status 503")
    server.close()
    fetch_again("cannot be reached")


@pytest.mark.parametrize(
    ("variables", "why"),
    [({}, "cannot be reached"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE")],
    ids=["down", "offline"],
)
def test_without_the_hub_and_without_a_copy_the_error_says_what_to_do(
    variables: dict[str, str], why: str, server: HubServer, machine: Machine
) -> None:
    server.close()
    message = machine.refusal("org/name", **variables)
    no_copy = f"{machine.home / 'hf' / 'hub'} has no cached copy"
    assert all(words in message for words in (why, no_copy, "Give a model folder", "hf download org/name"))


def test_a_hub_that_accepts_and_never_answers_is_given_up(tmp_path: Path, run_script: RunScript) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        machine = Machine(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}", run_script)
        assert "cannot be reached (" in machine.refusal("org/name", HF_HUB_ETAG_TIMEOUT="1")


def test_another_revision_is_another_copy(server: HubServer, machine: Machine) -> None:
    server.repos["org/name"] = Repo({**CONFIG, **WEIGHTS}, revisions=("main", "refs/pr/1"))
    assert machine.fetch("org/name@refs/pr/1").name == server.repos["org/name"].sha
    server.close()
    assert "has no cached copy" in machine.refusal("org/name")
    assert machine.fetch("org/name@refs/pr/1").is_dir()


@pytest.mark.parametrize(
    ("hub_id", "words"),
    [
        ("org/other", ("no folder 'org/other'", "knows no model 'org/other'")),
        ("org/name@v9", ("no revision 'v9'",)),
        ("org/na--me", ("neither a folder nor a name that the hub allows",)),
        (
            "org/gated",
            ("is gated: accept its conditions on http://127.0.0.1:", "/org/gated", "hf auth login", "HF_TOKEN"),
        ),
        ("org/huge", ("needs 1000000000.0 GB on the disk of", "HF_HOME")),
    ],
)
def test_what_cannot_be_fetched_says_what_to_do(
    hub_id: str, words: tuple[str, ...], server: HubServer, machine: Machine
) -> None:
    files = {**CONFIG, **WEIGHTS}
    server.repos["org/gated"] = Repo(files, gated=True)
    server.repos["org/huge"] = Repo(files, claimed_sizes={"model.safetensors": 10**18})
    message = machine.refusal(hub_id)
    assert all(part in message for part in words), message
    assert "model.safetensors" not in server.fetched()


def test_a_token_opens_and_is_never_shown(server: HubServer, machine: Machine) -> None:
    """Neither it nor a signed address is printed, even when all is logged that there is."""
    server.repos["org/name"] = Repo({**CONFIG, **WEIGHTS}, token=TOKEN)
    assert "HF_TOKEN" in machine.refusal("org/name")
    wrong = machine.refusal("org/name", HF_TOKEN="hf_wrong")
    assert "refuses access to org/name (401)" in wrong
    done = machine.process(FETCH, "org/name", "debug", HF_TOKEN=TOKEN, HF_DEBUG="1")
    assert _path(done.stdout).is_dir()
    for secret in (TOKEN, "hf_wrong", SIGNATURE):
        assert secret not in done.stdout + done.stderr + wrong


def test_no_password_of_the_endpoint_is_shown(server: HubServer, machine: Machine) -> None:
    url = server.url.replace("http://", "http://user:s3cret@")
    assert "s3cret" not in machine.run("org/name", HF_ENDPOINT=url)
    server.close()
    assert "s3cret" not in machine.refusal("org/other", HF_ENDPOINT=url)


def test_a_cached_copy_of_what_the_hub_denies_is_used_only_if_asked_for(server: HubServer, machine: Machine) -> None:
    path = machine.fetch("org/name")
    del server.repos["org/name"]
    assert "HF_HUB_OFFLINE=1 uses it" in machine.refusal("org/name")
    assert machine.fetch("org/name", HF_HUB_OFFLINE="1") == path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({**CONFIG, "pytorch_model.bin": b""}, r"org/name on the hub has only pickled weights (pytorch_model.bin)"),
        (CONFIG, "neither *.safetensors nor *.gguf"),
        ({"a.gguf": b"", "b.gguf": b""}, "several GGUF files (a.gguf, b.gguf)"),
        ({"adapter_config.json": b"", "adapter_model.safetensors": b""}, "no model by itself"),
        ({**CONFIG, "consolidated.safetensors": b""}, "neither model.safetensors nor model.safetensors.index.json"),
        ({**CONFIG, **SHARDS, "model.safetensors.index.json": b"{}"}, "without a weight_map"),
        ({**CONFIG, **SHARDS, "model.safetensors.index.json": b"[]"}, "index.json holds a list; needed: a JSON object"),
        ({**CONFIG, "model.safetensors": b"", "quantize_config.json": b"{}"}, "is a quantized checkpoint by GPTQ"),
        (
            {**CONFIG, **SHARDS, "model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'},
            "has no '../x.safetensors'",
        ),
    ],
)
def test_repos_that_cannot_be_loaded_are_refused_before_weights_are_fetched(
    files: dict[str, bytes], message: str, server: HubServer, machine: Machine
) -> None:
    server.repos["org/name"] = Repo(files)
    assert message in machine.refusal("org/name")
    assert [name for name in server.fetched() if name.endswith((".bin", ".safetensors", ".gguf"))] == []


def test_a_connection_that_breaks_off_is_taken_up_where_it_broke(server: HubServer, machine: Machine) -> None:
    """The library writes in pieces of 10 MiB; what is behind the last whole piece is fetched again."""
    content = os.urandom(25 << 20)
    files = {**CONFIG, "model.safetensors": content}
    server.repos["org/name"] = Repo(files, cut_once={"model.safetensors": 21 << 20})
    assert (machine.fetch("org/name") / "model.safetensors").read_bytes() == content
    ranges = [asked for _, name, asked in server.requests if name.endswith("/model.safetensors")]
    assert ranges[-1] == f"bytes={20 << 20}-"


def test_a_fetch_that_failed_goes_on_with_the_files_that_are_missing(server: HubServer, machine: Machine) -> None:
    """Until then the half copy is not taken for a model."""
    server.repos["org/name"] = repo = Repo({**CONFIG, **SHARDS}, broken={"model-2.safetensors"})
    assert "status 500" in machine.refusal("org/name")
    message = machine.refusal("org/name", HF_HUB_OFFLINE="1")
    assert "model-2.safetensors" in message
    assert "incomplete" in message
    repo.broken.clear()
    server.requests.clear()
    output = machine.run("org/name")
    assert "fetching 1 of 2 weights files" in output
    assert set(server.fetched()) == {"model-2.safetensors"}
    assert (_path(output) / "model-2.safetensors").read_bytes() == SHARDS["model-2.safetensors"]


def test_a_cache_that_cannot_be_written(server: HubServer, machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written: set HF_HOME" in machine.refusal("org/name", HF_HOME=str(tmp_path / "file" / "hf"))


def test_a_disk_that_fills_up_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub, "_list_files", lambda _: {"config.json": 1, "model.safetensors": 1})
    monkeypatch.setattr(hub, "_snapshot", full)
    with pytest.raises(ModelError, match=r"Fetching org/name failed: the disk of .* is full: make room"):
        hub.fetch_model(HubId("org/name", "main"), quiet)
