"""The guard by behaviour: a tiny model with the rules of a large one is compared before any weights are read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvpool.worker_service.attention.interface import ATTENTION_NAME, register
from kvpool.worker_service.model.errors import UnsupportedModel
from kvpool.worker_service.model.guard.support import check_replica, guarded
from kvpool.worker_service.model.guard.tiny_replica import (
    THRESHOLD,
    UNREACHED,
    build_replica,
    replica_config,
    replica_length,
)
from kvpool.worker_service.model.length import fix_longrope
from kvpool.worker_service.model.load import LoadedModel
from scripts.models.published import published_config
from tests.model.paged import NEVER, PagedModel, load
from tests.tiny_models import Oracle

CPU = torch.device("cpu")
ORIGINAL = 32
"""Tokens up to which the RoPE of these tests is as it was at first."""

# Plain, few heads, experts, soft caps, lists of factors, sinks, latent attention, KV of other layers, recurrent layers.
PUBLISHED_MODELS = (
    *("Llama 3.1 8B", "Qwen2.5 0.5B", "Qwen3 30B A3B", "Gemma 2 2B", "Phi-3.5 mini", "gpt-oss 20B", "DeepSeek V3"),
    *("Gemma 4 E2B", "Nemotron Nano 9B v2"),
)


def config(kind: str, **fields: Any) -> Any:
    return AutoConfig.for_model(kind, **fields)


# A period that says which layers attend, and heads of Mamba that must add up to a multiple of the size.
RECURRENT: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 5 + ["full_attention"]) * 5 + ["linear_attention"] * 2},
    "mamba2": {"n_groups": 3, "num_heads": 96, "hidden_size": 3072},
    "zamba": {},
    "nemotron_h": {},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
}


@pytest.mark.parametrize("name", [*PUBLISHED_MODELS, *RECURRENT])
def test_a_model_has_a_replica_that_runs(name: str) -> None:
    """Each kind of layer is in it, everything that begins at some length does, and it is small."""
    large = config(name, **RECURRENT[name]) if name in RECURRENT else published_config(name)
    length = large.max_position_embeddings if name in PUBLISHED_MODELS else 4096
    fix_longrope(large, length)
    if name != "recurrent_gemma":
        check_replica(large, length)
    small = replica_config(large, length)
    assert sum(parameter.numel() for parameter in build_replica(small).parameters()) < 1_000_000
    assert set(getattr(small, "layer_types", None) or ()) == set(getattr(large, "layer_types", None) or ())
    window = large.to_dict().get("sliding_window")
    if name in PUBLISHED_MODELS and window is not None and window < length:
        assert small.sliding_window == THRESHOLD < replica_length(large, length)


def test_a_rule_beyond_the_longest_text_begins_within_the_replica_s_row() -> None:
    """A window of 4,096 tokens plays no part in texts of 2,048; but several of them make a longer row."""
    windowed = config("mistral", sliding_window=4096)
    assert replica_config(windowed, 2048).sliding_window == UNREACHED == replica_length(windowed, 2048)
    assert replica_config(windowed, 8192).sliding_window == THRESHOLD


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("bloom", {}),
        ("recurrent_gemma", {}),
        ("doge", {}),
        ("llama4_text", {}),
        ("deepseek_v32", {}),
        ("bart", {"is_encoder_decoder": False, "is_decoder": True}),
        ("bert", {"is_decoder": False}),
    ],
)
def test_behaviour_alone_is_enough_to_refuse(kind: str, fields: dict[str, Any]) -> None:
    """Own attention code, states on the module, masks of their own, chunks, an indexer, positions that cannot be given, no
    causality: whatever check_config would say."""
    large = config(kind, **fields)
    # BART's decoder counts positions from 0 in every call: alone it is right, packed it is not.
    why = "computes other logits over paged KV" if kind == "bart" else "according to a tiny model of its kind"
    with pytest.raises(UnsupportedModel, match=why):
        check_replica(large, getattr(large, "max_position_embeddings", 4096))


@pytest.mark.parametrize("seed", range(12))
def test_a_replica_has_every_kind_of_layer_that_other_fields_make(seed: int) -> None:
    """Gemma's layers that lend or borrow KV follow from their number and types, Jamba's from periods: where those begin, and where
    the last layer of a kind is, differs."""
    draw = random.Random(seed)
    count, period = draw.randrange(12, 40), draw.randrange(2, 6)
    if seed % 2:
        types = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(count)]
        last = {
            "layer_types": [*types[:-1], "full_attention"],
            "num_kv_shared_layers": draw.randrange(count - 2 * period),
        }
        large, name = config("gemma4_text", num_hidden_layers=count, **last), "kv_sharing_modes"
    else:
        periods = {"attn_layer_period": period, "attn_layer_offset": draw.randrange(period), "num_hidden_layers": count}
        large, name = (
            config("jamba", **periods, expert_layer_period=draw.randrange(1, 4), expert_layer_offset=0),
            "layer_types",
        )
    small = replica_config(large, 4096)

    def kinds(of: Any) -> set[Any]:
        experts = getattr(of, "layers_num_experts", [0] * of.num_hidden_layers)
        return set(zip(of.layer_types, getattr(of, name), (number > 1 for number in experts), strict=True))

    assert kinds(small) == kinds(large)
    assert small.num_hidden_layers <= 2 * len(kinds(large)) if seed % 2 else True


def test_a_length_is_named_if_it_makes_the_model_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that the model keeps to itself is no window for texts that fit into it."""
    from transformers.models.mistral import modeling_mistral

    own = modeling_mistral.MistralAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return own(self, *args, **kwargs)
        finally:
            self.config.sliding_window = window

    large = config("mistral", sliding_window=4096)
    check_replica(large, 8192)
    monkeypatch.setattr(modeling_mistral.MistralAttention, "forward", forward)
    with pytest.raises(UnsupportedModel, match="--max-model-len 4096 or less"):
        check_replica(large, 8192)
    check_replica(large, 4096)


def rope_model(kind: str, rope_type: str, length: int, head_dim: int = 16) -> Any:
    """A tiny config whose RoPE changes behind ORIGINAL tokens, with max_position_embeddings = length."""
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {
            "short_factor": [1.0] * (head_dim // 2),
            "long_factor": [1.0 + pair for pair in range(head_dim // 2)],
        }
        rope |= {"original_max_position_embeddings": ORIGINAL}
    return config(
        kind, vocab_size=264, hidden_size=4 * head_dim, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length, pad_token_id=0, eos_token_id=None, rope_parameters=rope,
        **({"original_max_position_embeddings": ORIGINAL} if kind == "phi3" else {}),
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "rope_type"), [("llama", "dynamic"), ("llama", "longrope"), ("phi3", "longrope")])
def test_a_neighbour_at_the_last_position_tells_rope_that_depends_on_the_row(kind: str, rope_type: str) -> None:
    check_replica(rope_model(kind, "longrope", ORIGINAL, head_dim=12), ORIGINAL)
    length = ORIGINAL if rope_type == "dynamic" else 2 * ORIGINAL
    changing = rope_model(kind, rope_type, length)
    register()
    model = build_replica(changing)
    guarded(model, changing, torch.float32, CPU, ORIGINAL)
    with pytest.raises(UnsupportedModel, match=r"with a neighbour at position 63.*smaller --max-model-len"):
        guarded(model, changing, torch.float32, CPU, 2 * ORIGINAL)


@pytest.fixture
def longrope(tmp_path: Path) -> Path:
    """A tiny phi3 on disk."""
    build_replica(rope_model("phi3", "longrope", 4 * ORIGINAL)).save_pretrained(tmp_path)
    return tmp_path


def greedy(loaded: LoadedModel, *prompts: list[int]) -> list[list[int]]:
    paged = PagedModel(loaded)
    requests = [paged.request(prompt, 8) for prompt in prompts]
    paged.run(requests, chunk=7 if len(prompts) > 1 else NEVER)
    return [request.token_ids for request in requests]


def test_longrope_is_served_under_one_list_of_factors(longrope: Path) -> None:
    """Long texts equal generate, beside a short one and alone; where no text can be long, short ones do."""
    oracle = Oracle.of(longrope)
    short_text, long_text = list(range(20, 32)), list(range(40, 40 + ORIGINAL + 8))
    short_truth, long_truth = (oracle.logits(tuple(text), 8)[0] for text in (short_text, long_text))
    said: list[str] = []
    endless = load(longrope, said.append, max_model_len=4 * ORIGINAL)
    assert any(f"differ from those of transformers; --max-model-len {ORIGINAL}" in line for line in said), said
    assert greedy(endless, short_text, long_text)[1] == greedy(endless, long_text)[0] == long_truth
    assert greedy(endless, short_text, long_text)[0] == greedy(endless, short_text)[0]
    lines: list[str] = []
    for brief in (load(longrope, max_model_len=ORIGINAL), load(longrope, lines.append)):
        assert brief.facts.max_model_len == ORIGINAL, "by default only texts that are exact"
        assert greedy(brief, short_text, short_text[:5])[0] == short_truth
    assert greedy(endless, short_text)[0] != short_truth
    assert any(f"at most {ORIGINAL} tokens, equal to those of transformers" in line for line in lines), lines


def test_kv_of_different_factors_never_mixes(longrope: Path) -> None:
    """The choice is part of the fingerprint, hence of every root; the length itself is not."""
    names = {length: load(longrope, max_model_len=length).facts.model_fingerprint for length in (16, ORIGINAL, 64, 128)}
    assert names[16] == names[ORIGINAL] != names[64] == names[128]


def test_a_module_may_attend_several_times(tmp_path: Path) -> None:
    """diffllama does; each call has KV of its own, also behind a step that broke off in the middle."""
    build_replica(replica_config(config("diffllama"), 4096)).save_pretrained(tmp_path)
    loaded = load(tmp_path, max_model_len=64)
    prompt = list(range(30, 50))
    truth, _ = Oracle.of(tmp_path).logits(tuple(prompt), 8)
    paged = PagedModel(loaded)
    attention = loaded.runtime.layers[0].module

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle of a step")

    hook = attention.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="middle of a step"):
        paged.run([paged.request(prompt, 8)])
    hook.remove()
    request = paged.request(prompt, 8)
    paged.run([request], chunk=7)
    assert request.token_ids == truth


def test_the_model_is_as_it_was_after_the_check() -> None:
    model = AutoModelForCausalLM.from_config(replica_config(config("llama"), 2048), attn_implementation=ATTENTION_NAME)
    guarded(model.eval(), model.config, torch.float32, CPU, 64)
    assert model.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(Exception, match="was not bound at load"):
        model(torch.tensor([[1, 2]]), use_cache=False)
