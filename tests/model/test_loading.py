"""How weights get to their device: straight, once, and in a thread that knows which device it is; encoder-decoder models."""

from __future__ import annotations

import json
import re
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvpool.worker_service import server
from kvpool.worker_service.engine.prompt import EncoderSettings
from kvpool.worker_service.model.errors import ModelError, UnsupportedModel
from kvpool.worker_service.model.facts import read_encoder_settings
from kvpool.worker_service.model.forward import packed_linear
from kvpool.worker_service.model.forward.modules import modules_of
from kvpool.worker_service.model.forward.packed_linear import PackedLinear, pack_linears
from kvpool.worker_service.model.guard.support import check_config, check_replica
from kvpool.worker_service.model.guard.tiny_replica import replica_config
from kvpool.worker_service.model.settings import MemorySettings
from kvpool.worker_service.settings import WorkerSettings
from kvpool.worker_service.step import EncoderBlocks, SequencePart, Step
from scripts.models.subjects import default_seq2seq_config
from scripts.models.trial import save
from tests.model.paged import BLOCK_SIZE, GREEDY, NEEDS_PACKING, PagedModel, load, quiet
from tests.python_program import run_python
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
from types import SimpleNamespace
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

def load(folder):
    prepared = SimpleNamespace(dtype=torch.bfloat16, device=device)
    return runtimes.RuntimeLoader(folder, read_config(folder), prepared, None, folder, print)._load_weights()

tiny, large = Path(sys.argv[1]), Path(sys.argv[2])
for device in map(torch.device, sys.argv[3:]):
    load(tiny)  # what the first load brings along
    before, over = own_kib(), threading.Event()
    most = before
    thread = threading.Thread(target=watch)
    thread.start()
    model = load(large)
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
    done = run_python("-c", _LOAD, str(tiny), str(large), *devices)
    assert done.returncode == 0, done.stderr
    return dict(
        zip(devices, (int(kib) / 1024 for kib in re.findall(r"^growth (\d+)$", done.stdout, re.M)), strict=True)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process has of its own")
@pytest.mark.parametrize(("device", "most"), [("meta", 24), ("cpu", 96)])
def test_a_load_needs_no_more_host_memory_than_the_weights(
    growth_mib: dict[str, float], device: str, most: int
) -> None:
    """Weights for a device do not pass through it; the meta device stands for a GPU. A CPU holds converted ones once, 64 MiB in
    bfloat16, laid out for oneDNN one after the other; and not the 64 MiB before that as well."""
    assert growth_mib[device] < most


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
    # With every layer of two, at the latest when the next but one is packed.
    assert all(later <= sooner - 2 for sooner, later in zip(alive, alive[4:], strict=False))
    assert not [reference for reference in weights if reference() is not None]
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 2 * NUM_LAYERS


def test_a_model_that_was_loaded_with_a_device_map_has_no_hooks(tmp_path: Path) -> None:
    """Accelerate puts some around models that are spread over devices, which would cost time in every module."""
    model = modules_of(load(make_tiny_model("llama", tmp_path).path).runtime)
    assert not [name for name, module in model.named_modules() if "_hf_hook" in vars(module)]


# -- encoder-decoder models


def make(kind: str, folder: Path) -> Path:
    save(replica_config(default_seq2seq_config(kind), 1 << 20), folder)
    return folder


def test_the_facts_say_that_the_prompt_feeds_an_encoder(tmp_path: Path) -> None:
    lines: list[str] = []
    loaded = load(make("t5", tmp_path), lines.append, max_model_len=100, runtime="auto")
    assert loaded.encoder == EncoderSettings(512, 264, (0,))
    assert (loaded.facts.is_encoder_decoder, loaded.facts.max_encoder_tokens) == (True, 512)
    assert loaded.facts.max_model_len == 100
    assert "runtime: torch; not native: it computes no encoder-decoder models" in lines
    shorter = load(tmp_path, lines.append, max_encoder_tokens=40, runtime="auto").encoder
    assert shorter is not None
    assert shorter.max_tokens == 40


def test_decoders_begin_as_transformers_begins_them() -> None:
    config = AutoConfig.for_model("bart", decoder_start_token_id=5, bos_token_id=6, forced_bos_token_id=None)
    generation = GenerationConfig(decoder_start_token_id=7, forced_bos_token_id=9)
    assert read_encoder_settings(None, config, 10, 20) == EncoderSettings(10, 20, (5,))
    found = read_encoder_settings(generation, config, 10, 20)
    assert found == EncoderSettings(10, 20, (7, 9))
    assert read_encoder_settings(GenerationConfig(bos_token_id=3), AutoConfig.for_model("t5"), 1, 1).decoder_prompt == (
        3,
    )
    with pytest.raises(ModelError, match="has a decoder_start_token_id"):
        read_encoder_settings(None, AutoConfig.for_model("t5"), 10, 20)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"runtime": "native"}, "--runtime native cannot serve this model here: it computes no encoder-decoder models"),
        ({"quantize": "int8"}, "--quantize int8 needs the native step"),
        ({"max_encoder_tokens": 129}, "--max-encoder-tokens 129 is not within 1 … 128"),
    ],
)
def test_what_an_encoder_decoder_model_cannot_have_is_refused(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load(make("bart", tmp_path), **{"runtime": "auto", **more})


def test_a_limit_of_the_encoder_needs_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="has no encoder: leave out --max-encoder-tokens"):
        load(tmp_path, max_encoder_tokens=5)


@pytest.mark.parametrize("kind", ["t5", "t5gemma", "m2m_100"])
def test_a_model_in_bfloat16_passes_its_check_and_runs(kind: str, tmp_path: Path) -> None:
    loaded = load(make(kind, tmp_path), dtype="bfloat16")
    assert loaded.encoder is not None
    paged = PagedModel(loaded, backend=loaded.attention_backend("auto", BLOCK_SIZE, quiet))
    prompt = [*loaded.encoder.decoder_prompt, 33, 44]
    paged.run([paged.request(prompt, 2, encoder=paged.encoder([20, 30, 40, 50, 60, 70, 80]))])


def test_an_encoder_that_changes_with_its_inputs_is_refused() -> None:
    """After a short input it attends to everything for good, and then answers long ones in another way."""
    config = default_seq2seq_config("bigbird_pegasus")
    check_config(config, 4096)
    with pytest.raises(UnsupportedModel, match="another way after it has seen a shorter one") as refusal:
        check_replica(config, 4096)
    assert "--max-model-len" not in str(refusal.value)
    config.attention_type = "original_full"
    check_replica(config, 4096)


def test_a_step_leaves_the_attention_of_the_encoder_as_it_was(tmp_path: Path) -> None:
    """Encoder and decoder of BART have one config: the encoder's own attention must not become the decoder's."""
    loaded = load(make("bart", tmp_path))
    runner = loaded.runner(loaded.plan(MemorySettings(4, num_blocks=20, max_num_seqs=1)).kv_cache)
    part = SequencePart([2, 7], 0, ([1],), GREEDY, encoder=EncoderBlocks([1], 3, [5, 6, 7]))
    before = loaded.runtime.config._attn_implementation
    first = runner.execute(Step([part]))
    assert loaded.runtime.config._attn_implementation == before == "kvpool"
    again = runner.execute(Step([part._replace(encoder=EncoderBlocks([1], 3))]))
    assert first == again
    with pytest.raises(IndexError):
        runner.execute(Step([part._replace(encoder=EncoderBlocks([1], 3, [5, 9999, 7]))]))
    assert loaded.runtime.config._attn_implementation == "kvpool"
    assert runner.execute(Step([part])) == first
    assert torch.isfinite(torch.tensor([first[0].token.logprobs.logprob])).all()  # type: ignore[union-attr]
