"""A GGUF file is the model that its header and tensors mean, or it is refused by the key or tensor that is not taken over."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvpool.worker_service.model.candidate import find_candidate
from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.model.placement import read_config
from kvpool.worker_service.model.settings import ModelSettings
from kvpool.worker_service.model.source.convert import convert_gguf, dtype_that_keeps
from kvpool.worker_service.model.source.files import only_gguf
from tests.model.gguf_files import write_gguf
from tests.model.paged import load, quiet
from tests.tiny_models import COMMON, MAX_MODEL_LEN, VOCAB_SIZE, WINDOW, draw_weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

# model_type, fields of the config, keys of the header: much that transformers' own reader drops.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen3": ("qwen3", {"head_dim": 16}, {}),
    "qwen3moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        },
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16},
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": WINDOW, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0}
        | {"tie_word_embeddings": True},
        {"attention.sliding_window": WINDOW, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
    ),
    "starcoder2": ("starcoder2", {"use_bias": True, "rope_theta": 1e6, "norm_epsilon": 1e-2}, {}),
    "stablelm": ("stablelm", {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, {}),
    "phi3": (
        "phi3",
        {"sliding_window": WINDOW, "rope_theta": 3e4},
        {"attention.sliding_window": WINDOW, "tokenizer.ggml.padding_token_id": 0},
    ),
    "nemotron": ("nemotron", {"norm_eps": 1e-2}, {"attention.layer_norm_epsilon": 1e-2}),
}


def make(kind: str, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **{**COMMON, "intermediate_size": 64, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    draw_weights(model, torch.Generator().manual_seed(0))
    return model


def converted(path: Path) -> PreTrainedModel:
    folder = convert_gguf(path, path.parent / "cache", quiet)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def served(path: Path) -> LoadedModel:
    return load(path, cache_dir=path.parent / "cache")


def assert_equal(model: PreTrainedModel, other: PreTrainedModel, tolerance: float = 1e-5) -> None:
    tokens = torch.randint(VOCAB_SIZE, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, other(tokens).logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_any_tensor_that_a_file_lacks_is_named_and_nothing_is_kept(architecture: str, tmp_path: Path) -> None:
    """Of an expert's two merged matrices transformers would fill the missing one with zeros."""
    kind, fields, keys = KINDS[architecture]
    model, path = make(kind, **fields), tmp_path / "m.gguf"
    names = write_gguf(path, model, architecture, keys)
    # Without output.weight the two are tied.
    drawn = random.Random(architecture).sample(sorted(set(names) - {"output.weight"}), 2)
    tried = [*drawn, *[name for name in names if name.endswith("0.ffn_up_exps.weight")]]
    for name in tried:
        write_gguf(path, model, architecture, keys, leave_out=name)
        with pytest.raises(ModelError, match=rf"m\.gguf is incomplete: the model needs {name}, which"):
            convert_gguf(path, tmp_path / "cache", quiet)
    assert [entry.suffix for entry in (tmp_path / "cache" / "models").iterdir()] == [".lock"] * len(tried)


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "a factor without a type": ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "the key of old files": ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_beta_fast": 16.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
    ),
    "none": (
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "rope.scaling.finetuned": False},
        {"rope_type": "default"},
    ),
}


NEEDLESS_KEYS = {
    "llama.attention.causal": True,
    "llama.attention.sliding_window": MAX_MODEL_LEN,
    "llama.expert_count": 0,
    "llama.logit_scale": 1.0,
    "llama.pooling_type": 0,
    "llama.tensor_data_layout": "Meta AI original pth",
    "llama.rope.freq_base": None,
    "llama.attention.key_length": None,
    "general.quantized_by": "somebody",
    "split.no": 0,
    "split.count": 1,
}
"""They change nothing, so they are no reason to refuse a file."""
FILES = {architecture: (architecture, *kind) for architecture, kind in KINDS.items()}
FILES |= {
    f"llama, rope: {name}": ("llama", "llama", {"rope_parameters": {"rope_theta": 10000.0, **parameters}}, keys)
    for name, (keys, parameters) in ROPES.items()
}
FILES["llama, needless keys"] = ("llama", "llama", {}, NEEDLESS_KEYS)


@pytest.mark.parametrize(("architecture", "kind", "fields", "keys"), FILES.values(), ids=FILES)
def test_a_file_is_the_model_that_it_was_written_from(
    architecture: str, kind: str, fields: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    model = make(kind, **fields)
    write_gguf(tmp_path / "m.gguf", model, architecture, keys)
    assert_equal(model, converted(tmp_path / "m.gguf"))


def test_the_frequencies_of_llama_3_are_taken_over_from_their_tensor_and_served(tmp_path: Path) -> None:
    """The header does not say how the factors were found; the model is that of the config that has them."""
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = make("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **llama3})
    plain = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert len(set(factors)) > 2
    write_gguf(tmp_path / "m.gguf", model, "llama", extra={"rope_freqs.weight": factors})
    assert_equal(model, converted(tmp_path / "m.gguf"), 1e-4)
    assert served(tmp_path / "m.gguf").facts.max_model_len == MAX_MODEL_LEN


def test_the_two_lists_of_longrope_are_taken_over(tmp_path: Path) -> None:
    lists = {"short": [1.0, 1.1, 1.2, 1.3], "long": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "attention_factor": 1.25, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 128, **{f"{kind}_factor": values for kind, values in lists.items()}}
    model = make("phi3", rope_parameters=rope, sliding_window=None)
    extra = {f"rope_factors_{kind}.weight": np.array(values, np.float32) for kind, values in lists.items()}
    keys = {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 128}
    keys["tokenizer.ggml.padding_token_id"] = 0
    write_gguf(tmp_path / "m.gguf", model, "phi3", keys, extra=extra)
    found = converted(tmp_path / "m.gguf")
    assert_equal(model, found)
    assert found.config.rope_parameters["long_factor"] == lists["long"]


def test_the_windows_of_gemma_3_rotate_by_a_base_of_their_own_and_come_by_a_period(tmp_path: Path) -> None:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    fields = {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": WINDOW, "tie_word_embeddings": True}
    model = make("gemma3_text", **fields, layer_types=types, rope_parameters=rope, query_pre_attn_scalar=256)
    keys = {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 500.0}
    write_gguf(tmp_path / "m.gguf", model, "gemma3", keys)
    found = read_config(tmp_path, "m.gguf")
    assert found.layer_types == types
    assert {kind: one["rope_theta"] for kind, one in found.rope_parameters.items()} == {
        kind: one["rope_theta"] for kind, one in rope.items()
    }


def test_the_largest_gemma_scales_by_the_size_of_its_residual(tmp_path: Path) -> None:
    """No key of the header says so: hidden size / heads, where all others take the size of a head."""
    model = make("gemma2", head_dim=16, sliding_window=WINDOW, tie_word_embeddings=True)
    for layers, scalar in ((2, 256), (46, 8)):
        write_gguf(tmp_path / "m.gguf", model, "gemma2", {"block_count": layers})
        assert read_config(tmp_path, "m.gguf").query_pre_attn_scalar == scalar


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "su"),
        ("llama.rope.scaling.attn_factor", 1.5),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1),
        ("llama.rope.dimension_count", 4),
        ("llama.rope.dimension_sections", [1, 1, 2]),
        ("llama.attention.key_length_mla", 8),
        ("llama.attention.sliding_window", WINDOW),
        ("llama.attention.value_length", 4),
        ("llama.attention.causal", False),
        ("llama.attention.scale", 0.5),
        ("llama.attention.head_count_kv", [2, 4]),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.attn_logit_softcapping", 5.0),
        ("llama.final_logit_softcapping", 5.0),
        ("llama.logit_scale", 0.5),
        ("llama.embedding_scale", 12.0),
        ("llama.residual_scale", 0.5),
        ("llama.expert_count", 8),
        ("llama.expert_gating_func", 2),
        ("llama.expert_weights_scale", 2.5),
        ("llama.use_parallel_residual", True),
        ("llama.tensor_data_layout", "reference"),
        ("llama.some_new_rule", 7),
    ],
)
def test_a_key_that_changes_the_computation_is_refused_by_its_name(key: str, value: Any, tmp_path: Path) -> None:
    """Before anything is converted, and in the plan of a dry run."""
    write_gguf(tmp_path / "m.gguf", make("llama"), "llama", {key: value})
    with pytest.raises(ModelError, match=rf"m\.gguf has {key} = .*Give the model as safetensors"):
        read_config(tmp_path, "m.gguf")


@pytest.mark.parametrize(
    ("keys", "extra", "says"),
    [
        (
            {"split.no": 0, "split.count": 2},
            {},
            r"one of 2 parts of a model \(split\.count\)\. Join them with `llama-gguf",
        ),
        ({"split.count": 1, "split.tensors.count": 22}, {}, r"has 21 of the 22 tensors of its model"),
        ({"general.type": "adapter"}, {}, "is no model by itself: its general.type is adapter"),
        # a bias of llama's attention, without which the text is another one
        (
            {},
            {"blk.0.attn_q.bias": np.ones(32, np.float32)},
            r"has blk\.0\.attn_q\.bias, which transformers does not read",
        ),
    ],
    ids=["a part", "tensors are missing", "an adapter", "a tensor too many"],
)
def test_what_is_no_whole_model_is_refused(
    keys: dict[str, Any], extra: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", make("llama"), "llama", keys, extra=extra)
    with pytest.raises(ModelError, match=says):
        served(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"the parts of one model.*llama-gguf-split --merge"):
        only_gguf("here", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"])


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ((Q.F32, Q.F32), torch.float32),
        ((Q.F16, Q.F16), torch.float16),
        ((Q.BF16, Q.BF16), torch.bfloat16),
        ((Q.F16, Q.F32), torch.float32),
        ((Q.F16, Q.BF16), torch.float32),
        ((Q.BF16, Q.F32), torch.float32),
        ((Q.Q8_0, Q.F32), torch.bfloat16),
    ],
    ids=str,
)
def test_the_type_of_a_conversion_keeps_every_matrix(kinds: tuple[Q, Q], dtype: torch.dtype, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make("llama"), "llama", quantization=lambda name: kinds["ffn_gate" in name])
    assert dtype_that_keeps(tmp_path / "m.gguf") is dtype


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\n", "is a pointer of git-lfs"),
        (b"", "is no GGUF file"),
        (b"GGUF\x03\x00\x00\x00", "is cut short or damaged: "),
        (None, "is cut short or damaged: "),
    ],
)
def test_a_broken_file_is_named(content: bytes | None, says: str, tmp_path: Path) -> None:
    """None: a sound one without its end."""
    if content is None:
        write_gguf(tmp_path / "m.gguf", make("llama"), "llama")
        content = (tmp_path / "m.gguf").read_bytes()[:-4000]
    (tmp_path / "m.gguf").write_bytes(content)
    if not content.startswith(b"GGUF"):
        with pytest.raises(ModelError, match=says):
            find_candidate(ModelSettings(str(tmp_path), device="cpu"), quiet)
    with pytest.raises(ModelError, match=rf"m\.gguf {says}"):
        served(tmp_path / "m.gguf")
