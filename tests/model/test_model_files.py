"""A broken file of a model is named in one sentence that says what to do, from every way in; no traceback of a library."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import structlog.testing
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvpool.cli.launch.cluster import free_port
from kvpool.worker_service.model import load as load_module
from kvpool.worker_service.model.candidate import find_candidate
from kvpool.worker_service.model.device import choose_device
from kvpool.worker_service.model.errors import ModelError, library_errors
from kvpool.worker_service.model.settings import ModelSettings
from tests.cluster.fork_server import WORKER_MODULE
from tests.cluster.process import Process
from tests.model.paged import load, quiet
from tests.python_program import run_python
from tests.tiny_models import EOS_TOKEN_ID, edit_json, make_tiny_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n"
SMALL = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja")
WEIGHTS = "model.safetensors"
Break = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("sound"), tokenizer=True, eos_token_id=EOS_TOKEN_ID).path


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "m"))


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def dangling(file: Path) -> None:
    """As in a cache of which the contents were removed."""
    file.unlink()
    file.symlink_to("gone")


BREAKS: dict[str, Break] = {
    "a pointer": lambda file: file.write_bytes(POINTER),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"more"),
    "a folder": as_folder,
    "a dangling link": dangling,
    "other bytes": lambda file: file.write_bytes(b"\xff\xfe\x00" * 40),
}


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("name", [*SMALL, WEIGHTS])
def test_a_broken_file_is_named(name: str, how: str, folder: Path) -> None:
    """Of a small one `kvpool up` hears before it starts workers. Any text is a template."""
    BREAKS[how](folder / name)
    if name.endswith("config.json"):
        with pytest.raises(ModelError, match=name):
            find_candidate(ModelSettings(str(folder), device="cpu"), quiet)
    if name == "chat_template.jinja" and how in ("empty", "cut", "longer"):
        load(folder)
        return
    with pytest.raises(ModelError) as refusal:
        load(folder)
    text = str(refusal.value)
    assert str(folder / name) in text or (name == WEIGHTS and how == "a dangling link"), text
    assert len(text.splitlines()) == 1
    assert text.endswith(".")


@pytest.mark.parametrize("content", ["[1]", "null", "7", '"text"', "{,}", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_that_is_no_object_is_named(name: str, content: str, folder: Path) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=rf"{name} (holds|is not valid JSON)"):
        load(folder)


@pytest.mark.parametrize("seed", range(2))
def test_a_config_with_something_else_where_a_number_belongs_is_one_sentence_or_a_model(
    seed: int, folder: Path
) -> None:
    """Never an error of another kind. Fields and values are drawn: null, text, lists, objects, negative and endless numbers."""
    draw, config = random.Random(seed), json.loads((folder / "config.json").read_bytes())
    numbers = sorted(name for name, value in config.items() if type(value) in (int, float))
    for field in draw.sample([*numbers, "sliding_window", "rope_parameters", "eos_token_id"], 4):
        value: Any = draw.choice([None, "many", "7", [1], {}, [{}], -1, 0, 1e400, True])
        (folder / "config.json").write_text(json.dumps(config | {field: value}))
        with contextlib.suppress(ModelError):
            load(folder)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"eos_token_id": "2"}, "eos_token_id; needed: an id or a list of ids, or null"),
        ({"eos_token_id": [1, None, {}]}, "has a list as eos_token_id"),
        ({"forced_bos_token_id": True}, "has true or false as forced_bos_token_id"),
        ({"temperature": "hot"}, "has text as temperature; needed: a number, or null"),
        ({"repetition_penalty": {}}, "has an object as repetition_penalty"),
        *(
            ({"chat_template": template}, "has a chat_template that is neither text nor a list of named ones")
            for template in (7, {"default": "x"}, ["x"], [{"name": "default"}, 3])
        ),
    ],
    ids=str,
)
def test_a_field_of_another_kind_is_named(fields: dict[str, Any], says: str, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    name = "tokenizer_config.json" if "chat_template" in fields else "generation_config.json"
    edit_json(folder / name, **fields)
    with pytest.raises(ModelError, match=says):
        load(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "without a weight_map"),
        ({"weight_map": ["a"]}, "without a weight_map"),
        ({"weight_map": {"a": 1, "b": "c"}}, "without a weight_map"),
        ({"weight_map": {"lm_head.weight": "model-2.safetensors"}}, "has no 'model-2.safetensors', which its"),
    ],
)
def test_an_index_that_leads_nowhere_is_named(content: dict[str, Any], says: str, folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=says):
        load(folder)


# -- quantized


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        *(
            ({"quantization_config": {"quant_method": method}}, f" by {method} ")
            for method in ("gptq", "fp8", "a new one")
        ),
        ({"quantization_config": {"load_in_4bit": True}}, " by bitsandbytes "),
        ({"quantization_config": {"bits": 4}}, r" \(its config\.json has"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, " by compressed-tensors "),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, " by awq "),
    ],
    ids=str,
)
def test_a_quantized_checkpoint_is_refused_by_the_name_of_its_quantizer(
    fields: dict[str, Any], says: str, folder: Path
) -> None:
    """At once, also by `kvpool up`: no library of the quantizer is looked for."""
    edit_json(folder / "config.json", **fields)
    with pytest.raises(ModelError, match=rf"is a quantized checkpoint{says}.*Give the model that was quantized"):
        find_candidate(ModelSettings(str(folder), device="cpu"), quiet)
    with pytest.raises(ModelError, match=says):
        load(folder)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_a_quantizer_that_wrote_a_file_of_its_own_is_found(name: str, folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config=None)
    load(folder)  # an empty field is none
    (folder / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"quantized checkpoint by \w+ \(it has {name}\)"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32])
def test_packed_weights_without_a_word_about_them_are_refused(dtype: torch.dtype, folder: Path) -> None:
    """transformers would take the numbers as they are, without their scales."""
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"quantized checkpoint \({name} has the type [FIU]\d"):
        load(folder)


# -- errors of libraries that nobody has foreseen


def test_an_error_of_a_library_is_one_sentence_with_its_message_and_the_traceback_for_debugging() -> None:
    def read() -> None:
        with library_errors("X cannot be read", "Do Y."):
            AutoConfig.for_model("x" * 5000)

    with structlog.testing.capture_logs() as logs, pytest.raises(ModelError) as refusal:
        read()
    text = str(refusal.value)
    assert text.startswith("X cannot be read: ValueError: Unrecognized model identifier: xxx")
    assert text.endswith(". Do Y.")
    assert len(text) < 600
    assert len(text.splitlines()) == 1
    assert [(entry["log_level"], entry["exc_info"]) for entry in logs] == [("debug", refusal.value.__cause__)]


def test_a_mistake_of_ours_stays_what_it_is(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that Python's own library notices."""
    monkeypatch.setattr(load_module, "check_weights", lambda _: choose_device(None))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        load(sound)


# -- the processes


def test_a_worker_ends_with_the_sentence_and_no_traceback(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert Process.fork_server is not None
    log, arguments = tmp_path / "log", ["--model", str(folder), "--device", "cpu", "--port", "0"]
    status = Process.fork_server.start(WORKER_MODULE, arguments, log).wait(100)
    printed = log.read_text()
    assert status == 1, printed
    assert printed.splitlines()[-1].startswith(
        f"kvpool worker: {folder} is incomplete: the model needs model.norm.weight, which no file there has."
    )
    assert "Traceback" not in printed


def test_kvpool_up_ends_with_the_sentence_and_no_traceback(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_bytes(POINTER)
    flags = ["--model", str(folder), "--port", str(free_port())]
    done = run_python("-m", "kvpool.cli", "up", *flags, HOME=str(tmp_path), NO_COLOR="1")
    assert done.returncode == 1, done.stderr
    assert f"{folder / 'config.json'} is a pointer of git-lfs, not the file itself." in done.stderr
    assert "Traceback" not in done.stderr
