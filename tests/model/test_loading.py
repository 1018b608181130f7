"""How weights get to their device: straight, once, and in a thread that knows which device it is."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvpool.worker_service import server
from kvpool.worker_service.model.device import enter_device
from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.forward import packed_linear
from kvpool.worker_service.model.forward.modules import modules_of
from kvpool.worker_service.model.forward.packed_linear import PackedLinear, pack_linears
from kvpool.worker_service.settings import WorkerSettings
from tests.model.paged import NEEDS_PACKING, load
from tests.tiny_models import make_tiny_model

# -- the device of the model's thread


async def test_the_thread_that_loads_and_runs_the_model_enters_its_device_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread's current device is the first GPU until it is set: kernels of --device cuda:1 would be launched there."""
    seen: list[tuple[str, Any]] = []

    def note(what: Any) -> None:
        seen.append((threading.current_thread().name, what))

    def load_model(*_: Any, **__: Any) -> None:
        note("load")
        raise ModelError("as far as this goes without a GPU")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", note)
    monkeypatch.setattr(server, "load_model", load_model)
    with pytest.raises(ModelError, match="without a GPU"):
        await server.WorkerServer.load(WorkerSettings(device="cuda:1", model="any"))  # type: ignore[call-arg]
    names, events = zip(*seen, strict=True)
    assert events == (torch.device("cuda", 1), "load")
    assert len(set(names)) == 1
    assert names[0].startswith("model")


def test_a_cpu_is_no_device_to_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("there is none"))
    enter_device(torch.device("cpu"))


# -- weights in host memory


NUM_LAYERS = 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 MiB of weights in float32: much more than loading needs next to them."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1360,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("large")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


# What a process has of its own, at its largest while it loads; pages of a mapped file are the kernel's to drop.
_LOAD = """
import sys, threading
from pathlib import Path
import torch
from kvpool.worker_service.model import runtimes
from kvpool.worker_service.model.placement import read_config

def own_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    global most
    while not over.wait(0.002):
        most = max(most, own_kib())

tiny, large, dtype = Path(sys.argv[1]), Path(sys.argv[2]), torch.bfloat16
for device in map(torch.device, sys.argv[3:]):
    runtimes._load_weights(tiny, read_config(tiny), dtype, device)  # what the first load brings along
    config = read_config(large)
    before, over = own_kib(), threading.Event()
    most = before
    thread = threading.Thread(target=watch)
    thread.start()
    model = runtimes._load_weights(large, config, dtype, device)
    over.set()
    thread.join()
    assert {parameter.device.type for parameter in model.parameters()} == {device.type}
    print("growth", max(most, own_kib()) - before)
    del model
"""


@pytest.fixture(scope="module")
def growth_mib(large: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """By device. One process loads for both, first for the one that must not make it grow; what this leaves in its heap
    hides less of the second growth than the room that the bounds have."""
    devices = ("meta", "cpu")
    tiny = make_tiny_model("llama", tmp_path_factory.mktemp("tiny")).path
    command = [sys.executable, "-c", _LOAD, str(tiny), str(large), *devices]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(
        zip(devices, (int(kib) / 1024 for kib in re.findall(r"^growth (\d+)$", done.stdout, re.M)), strict=True)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process has of its own")
def test_weights_do_not_pass_through_host_memory_on_their_way_to_a_device(growth_mib: dict[str, float]) -> None:
    """The meta device stands for a GPU: whatever grows here grew in host memory. Narrower than the file, so they are converted."""
    assert growth_mib["meta"] < 24


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process has of its own")
def test_a_cpu_holds_converted_weights_once(growth_mib: dict[str, float]) -> None:
    """64 MiB in bfloat16, laid out for oneDNN one after the other; and not the 64 MiB before that as well."""
    assert growth_mib["cpu"] < 96


@NEEDS_PACKING
def test_an_unpacked_weight_goes_before_the_next_layer_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(NUM_LAYERS)]
    model = torch.nn.Sequential(*layers)
    weights = [
        weakref.ref(module.weight) for layer in layers for module in layer if isinstance(module, torch.nn.Linear)
    ]
    del layers
    pack = packed_linear._pack
    alive: list[int] = []

    def counting(weight: torch.Tensor) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in weights))
        return pack(weight)

    monkeypatch.setattr(packed_linear, "_pack", counting)
    assert pack_linears(model) == 2 * NUM_LAYERS
    assert _falls(alive, by=2)
    assert not [reference for reference in weights if reference() is not None]
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 2 * NUM_LAYERS


def _falls(counts: Sequence[int], by: int) -> bool:
    """With every layer of two, at the latest when the next but one is packed."""
    return all(later <= sooner - by for sooner, later in zip(counts, counts[2 * by :: 1], strict=False))


def test_a_model_that_was_loaded_with_a_device_map_has_no_hooks(tmp_path: Path) -> None:
    """Accelerate puts some around models that are spread over devices, which would cost time in every module."""
    model = modules_of(load(make_tiny_model("llama", tmp_path).path).runtime)
    assert not [name for name, module in model.named_modules() if "_hf_hook" in vars(module)]
