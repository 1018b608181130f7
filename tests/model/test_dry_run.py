"""`kvpool worker --dry-run`: the plan of a real start, from the model's config alone."""

from __future__ import annotations

import os
import re
from contextlib import closing
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvpool.worker_service.dry_run import dry_run
from kvpool.worker_service.model.candidate import find_candidate
from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.outline import outline_model
from kvpool.worker_service.model.settings import MemorySettings, ModelSettings
from kvpool.worker_service.native.cpu import cpu_info
from kvpool.worker_service.settings import WorkerSettings
from tests.model.gguf_files import write_gguf
from tests.model.hub_server import HubServer, fresh_processes, repo_of
from tests.model.paged import load, quiet
from tests.model.truth.encoders import make as make_with_encoder
from tests.python_program import run_python
from tests.tiny_models import MAX_MODEL_LEN, build_model, make_tiny_model


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """A model folder whose weights were not fetched."""
    full = make_tiny_model("llama", tmp_path / "full").path
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_bytes((full / "config.json").read_bytes())
    return folder


def printed(settings: WorkerSettings) -> str:
    console = Console(file=StringIO(), width=120)
    dry_run(settings, console, quiet)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def settings(model: Path | str, **more: object) -> WorkerSettings:
    return WorkerSettings(model=str(model), device="cpu", dtype="float32", **more)  # type: ignore[arg-type]


def rows(text: str) -> dict[str, str]:
    """The first two columns of all tables."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1] for row in cells if len(row) >= 2}


@pytest.mark.parametrize(
    ("changes", "flag", "expected"),
    [
        ({}, None, "native if it computes the model, else torch"),
        (
            {},
            "amx_bf16",
            "native if it computes the model and, where only torch uses amx_bf16, is not slower; else torch",
        ),
        ({"dtype": "float32"}, "amx_bf16", "native if it computes the model, else torch"),
        ({"dtype": "float16"}, "amx_bf16", "torch: the native step does not compute float16"),
        ({"runtime": "native"}, "amx_bf16", "native"),
        ({"runtime": "torch"}, "amx_bf16", "torch"),
        ({"attention_backend": "torch"}, "amx_bf16", "torch"),
        ({"quantize": "int8"}, "amx_bf16", "native"),
    ],
    ids=str,
)
def test_the_runtime_that_a_start_is_expected_to_choose(
    changes: dict[str, Any], flag: str | None, expected: str, config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_info, "matrix_unit", lambda number_type: flag if number_type == "bfloat16" else None)
    wanted = WorkerSettings(
        model=str(config_only), device="cpu", cache_dir=config_only / "cache", **{"dtype": "bfloat16", **changes}
    ).model_settings()
    assert outline_model(find_candidate(wanted, quiet), wanted).runtime == expected
    assert not (config_only / "cache" / "runtimes").exists()


def test_a_config_is_enough(config_only: Path) -> None:
    found = rows(printed(settings(config_only, num_blocks=101)))
    assert found["name"] == "tiny-llama"
    assert found["runtime"].startswith("native if it computes the model")
    assert found["parameters"] == "32,416"
    assert found["weights in float32"].endswith("KiB (chosen)")
    assert found["weights in bfloat16"].endswith("KiB")
    # 2 layers × K and V × 2 heads × 8 numbers × 4 bytes
    assert found["bytes per token"] == "256"
    assert found["bytes per block"] == "4,096 (16 tokens)"
    assert found["KV cache"] == "404.00 KiB"
    assert found["tokens"] == "1,600"
    assert found["sequences of 512 tokens"] == "3.12 at once"
    assert MAX_MODEL_LEN == 512


def test_sequences_are_counted_at_several_lengths(tmp_path: Path) -> None:
    config = (
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9, '
    )
    (tmp_path / "config.json").write_text(config + '"intermediate_size": 8, "max_position_embeddings": 10000}')
    found = rows(printed(settings(tmp_path, num_blocks=1001)))
    counted = {name: value for name, value in found.items() if name.startswith("sequences of")}
    assert counted == {
        "sequences of 512 tokens": "31.25 at once",
        "sequences of 2,048 tokens": "7.81 at once",
        "sequences of 8,192 tokens": "1.95 at once",
        "sequences of 10,000 tokens": "1.60 at once",
    }


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "deepseek_v3", "lfm2", "mamba2", "t5", "t5gemma"])
def test_the_plan_is_the_one_of_a_real_start(kind: str, tmp_path: Path) -> None:
    """Without weights; and what it says is what a start allocates."""
    is_seq2seq = kind.startswith("t5")
    folder = make_with_encoder(kind, tmp_path).path if is_seq2seq else make_tiny_model(kind, tmp_path).path
    model_settings = ModelSettings(str(folder), dtype="float32", device="cpu", max_model_len=100)
    outline = outline_model(find_candidate(model_settings, quiet), model_settings)
    loaded = load(folder, max_model_len=100)
    for memory in (MemorySettings(16, kv_cache_memory=5_000_000), MemorySettings(8, num_blocks=50)):
        ours, real = outline.plan(memory), loaded.plan(memory)
        assert ours.kv_cache == real.kv_cache
        if kind != "t5gemma":  # whose head is packed, apart from the embedding that it is tied to
            assert ours.facts.weight_bytes == real.facts.weight_bytes
        assert ours.facts.activation_bytes == real.facts.activation_bytes
        cache = loaded.runner(real.kv_cache).kv_cache
        tensors = [*(cache.states or ()), *(kv for layer in cache.layers for kv in (layer.k_cache, layer.v_cache))]
        assert sum(tensor.nbytes for tensor in tensors) == real.kv_cache.total_bytes
    assert outline.prepared.max_model_len == loaded.facts.max_model_len


def test_a_gguf_is_not_converted(tmp_path: Path) -> None:
    file, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(file, build_model("llama", seed=0), "llama")
    text = printed(settings(file, cache_dir=cache, num_blocks=101))
    assert re.match(r"tiny: \S+tiny.gguf\n", text)
    found = rows(text)
    assert found["parameters"] == "32,416"
    assert found["bytes per token"] == "256"
    assert found["longest sequence"] == "512 tokens"
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model": "/no/such"}, "There is no model folder '/no/such'"),
        ({"cache_dir": Path("/proc/x")}, "The cache folder /proc/x cannot be made"),
        ({"device": "cuda:99"}, "There is no device 'cuda:99'"),
        ({"device": "tpu"}, "Unknown device 'tpu': give auto, cpu, cuda or cuda:N."),
        (
            {"max_model_len": MAX_MODEL_LEN + 1},
            f"--max-model-len {MAX_MODEL_LEN + 1} is not within 2 … {MAX_MODEL_LEN}",
        ),
    ],
)
def test_what_kvpool_up_waits_for_is_refused_before_the_plan(
    more: dict[str, object], says: str, config_only: Path
) -> None:
    model_settings = replace(ModelSettings(str(config_only), device="cpu"), **more)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=re.escape(says)):
        find_candidate(model_settings, quiet)
    assert printed(settings(config_only, num_blocks=9)).startswith(
        f"tiny-llama (llama): {config_only / 'config.json'}\n"
    )


def test_what_kvpool_up_waits_for_needs_neither_torch_nor_transformers(config_only: Path) -> None:
    """Their import takes the seconds that the workers start later."""
    script = f"""
import sys
from kvpool.worker_service import __main__, dry_run
from kvpool.worker_service.model.candidate import find_candidate
from kvpool.worker_service.model.settings import ModelSettings
for device in ("auto", "cpu"):
    print(find_candidate(ModelSettings({str(config_only)!r}, device=device, max_model_len=9), print))
print({{"torch", "transformers"}} & sys.modules.keys())
"""
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"tiny-llama (llama): {config_only / 'config.json'}\n" * 2 + "set()\n"


@pytest.mark.parametrize(
    ("config", "says"),
    [('{"model_type": 5}', "transformers cannot read"), ('{"model_type": "whisper"}', "whisper"), (None, "neither")],
)
def test_a_model_that_would_be_refused_is_refused(config: str | None, says: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=says):
        printed(settings(tmp_path))


def test_of_a_model_on_the_hub_the_config_alone_is_fetched(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model").path
    script = """
import sys
from kvpool.worker_service.model.candidate import find_candidate
from kvpool.worker_service.model.settings import ModelSettings
print(find_candidate(ModelSettings("org/tiny", device="cpu"), lambda _: None).file)
assert "torch" not in sys.modules
"""
    with closing(HubServer()) as server, fresh_processes(tmp_path) as run:
        server.repos["org/tiny"] = repo_of(folder)
        done = run(
            script, PATH=os.environ["PATH"], HF_HOME=str(tmp_path / "hf"), HF_ENDPOINT=server.url, HOME=str(tmp_path)
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert any(path.endswith("config.json") for _, path, _ in server.requests)
        assert not any("safetensors" in path for _, path, _ in server.requests)
    fetched = Path(done.stdout.strip()).parent
    assert rows(printed(settings(fetched, num_blocks=101)))["parameters"] == "32,416"


@pytest.mark.parametrize(
    ("architecture", "group", "count", "more"),
    [("lfm2", 1, 64 * 4 + 1, {}), ("lfm2", 1, 9, {"state_blocks": 9}), ("mamba2", 0, 64, {})],
)
def test_the_states_of_recurrent_layers_have_a_line(
    architecture: str, group: int, count: int, more: dict[str, int], tmp_path: Path
) -> None:
    path = make_tiny_model(architecture, tmp_path).path
    table = rows(printed(settings(path, max_model_len=MAX_MODEL_LEN, num_blocks=64, block_size=4, **more)))
    assert table[f"blocks of group {group}, states"].startswith(f"{count:,} of ")
    assert table["runtime"].startswith("torch")


def test_an_encoder_decoder_model_runs_with_torch_and_has_a_group_for_its_encoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "decoder_start_token_id": 0, "n_positions": 200}')
    text = printed(settings(tmp_path, num_blocks=100, max_num_seqs=2))
    assert re.search(r"runtime\W+torch: the native step computes no\s", text)
    assert re.search(r"longest sequence\W+200 tokens", text)
    assert re.search(r"longest input of the encoder\W+200 tokens", text)
    assert re.search(r"group 1, encoder's outputs\W+27 of ", text)
    assert re.search(r"inputs of 200 tokens\W+2.00 at once", text)
