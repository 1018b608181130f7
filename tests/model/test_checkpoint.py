"""A checkpoint is loaded whole or refused: nothing that it lacks is drawn at random. Odd but complete ones load."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from kvpool.worker_service.model.checkpoint import load_whole, stored_spelling
from kvpool.worker_service.model.errors import ModelError
from tests.model.paged import load
from tests.tiny_models import build_model, edit_json, make_tiny_model

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], Tensors]
NUM_DRAWN = 3
SIZES: dict[str, Any] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "d_model": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def without(part: str) -> Edit:
    """Takes away the tensors with this in their names."""
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if part not in key}


def edited(folder: Path, edit: Edit) -> Path:
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    return folder


def whole(folder: Path, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    names = load_file(folder / "model.safetensors").keys()
    model: PreTrainedModel = load_whole(
        auto, folder, names, stored_spelling, config=AutoConfig.from_pretrained(folder)
    )[0]
    return model


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "opt", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "jamba", "mamba"]
)
def test_any_tensor_that_is_missing_is_named(architecture: str, tmp_path: Path) -> None:
    """Also one expert of those that are merged at load in each way, a state's parameter, or a head that has another name in the
    file."""
    folder = make_tiny_model(architecture, tmp_path).path
    file = folder / "model.safetensors"
    complete = load_file(file)
    assert whole(folder).state_dict().keys() == build_model(architecture, 0).state_dict().keys()
    for name in random.Random(architecture).sample(sorted(complete), NUM_DRAWN):
        save_file({key: complete[key] for key in complete.keys() - {name}}, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=f"is incomplete: the model needs {name}, which no file there has"):
            whole(folder)


@pytest.mark.parametrize(
    ("fields", "edit", "says"),
    [
        (
            {},
            without(".layers.1."),
            r"needs model\.layers\.1\.\S+, \S+, \S+ and 6 more tensors, which no file there has",
        ),
        ({"num_hidden_layers": 3}, without("nothing"), r"needs model\.layers\.2\.input_layernorm\.weight, "),
        (
            {},
            lambda tensors: {f"net.{key}": tensor for key, tensor in tensors.items()},
            r"and 18 more tensors, which no file there has\. It has net\.lm_head\.weight, ",
        ),
        (
            {},
            lambda tensors: tensors | {"model.norm.weight": torch.ones(31)},
            r"does not fit its config: model\.norm\.weight \(\[31\] instead of \[32\]\)\. ",
        ),
    ],
    ids=["a layer lacks", "a layer too many in the config", "names of another model", "another shape"],
)
def test_a_worker_names_what_does_not_fit(fields: dict[str, Any], edit: Edit, says: str, tmp_path: Path) -> None:
    folder = edited(make_tiny_model("llama", tmp_path).path, edit)
    edit_json(folder / "config.json", **fields)
    with pytest.raises(ModelError, match=says):
        load(folder)


def test_a_shard_without_what_the_index_promises_is_refused(tmp_path: Path) -> None:
    build_model("llama", 0).save_pretrained(tmp_path, max_shard_size="60KB")
    whole_shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(whole_shards) > 1
    load(tmp_path)
    tensors = load_file(whole_shards[0])
    name = min(tensors)
    save_file({key: tensors[key] for key in tensors.keys() - {name}}, whole_shards[0], metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"needs {name}, which"):
        load(tmp_path)


# -- odd, and complete


@pytest.mark.parametrize("kept", [{"lm_head.weight"}, {"model.embed_tokens.weight"}, set()], ids=str)
def test_one_of_two_tied_tensors_is_enough(kept: set[str], tmp_path: Path) -> None:
    model = build_model("llama", 0)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    embedding = model.get_input_embeddings().weight.detach()
    tied = {"lm_head.weight", "model.embed_tokens.weight"}
    edited(
        tmp_path, lambda tensors: {k: t for k, t in tensors.items() if k not in tied} | dict.fromkeys(kept, embedding)
    )
    if kept:
        found = whole(tmp_path)
        assert torch.equal(found.get_output_embeddings().weight, embedding)
        assert torch.equal(found.get_input_embeddings().weight, embedding)
    else:
        with pytest.raises(ModelError, match=r"needs (lm_head|model\.embed_tokens)\.weight"):
            whole(tmp_path)


def test_tensors_that_the_model_does_not_use_are_listed_and_harm_nothing(tmp_path: Path) -> None:
    """Frequencies of old checkpoints, masks, parts for images, layers that predict ahead."""
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "visual.patch_embed.weight": torch.ones(2, 2),
        "model.layers.2.enorm.weight": torch.ones(32),
        "mask": torch.ones(4, 4, dtype=torch.uint8),
    }
    folder = edited(make_tiny_model("llama", tmp_path).path, lambda tensors: tensors | extra)
    assert torch.equal(whole(folder).lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


def test_a_checkpoint_of_the_bare_model_has_no_prefix(tmp_path: Path) -> None:
    build_model("gpt2", 0).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    edited(tmp_path, without("lm_head.weight"))
    whole(edited(tmp_path, lambda tensors: {key.removeprefix("transformer."): t for key, t in tensors.items()}))
    edited(tmp_path, without("h.1.ln_2.weight"))
    with pytest.raises(ModelError, match=r"needs transformer\.h\.1\.ln_2\.weight, which"):
        whole(tmp_path)


@pytest.mark.parametrize("is_bare", [True, False])
def test_a_bias_that_transformers_ignores_may_be_missing_in_the_bare_model_only(is_bare: bool, tmp_path: Path) -> None:
    """BART was published as a model without a head too. In a checkpoint that has a head, the bias of the head is part of it."""
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **SIZES)).save_pretrained(tmp_path)
    whole(tmp_path, AutoModelForSeq2SeqLM)
    edited(tmp_path, without("final_logits_bias"))
    if is_bare:
        edited(tmp_path, without("lm_head.weight"))
        edited(tmp_path, lambda tensors: {key.removeprefix("model."): tensor for key, tensor in tensors.items()})
        assert not whole(tmp_path, AutoModelForSeq2SeqLM).final_logits_bias.any()
    else:
        with pytest.raises(ModelError, match="needs final_logits_bias, which"):
            whole(tmp_path, AutoModelForSeq2SeqLM)


@pytest.mark.parametrize("kind", ["pegasus", "marian"])
def test_a_table_that_the_model_computes_may_be_missing(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **SIZES))
    saved.save_pretrained(tmp_path)
    positions = saved.model.encoder.embed_positions.weight
    edited(tmp_path, without("embed_positions"))
    found = whole(tmp_path, AutoModelForSeq2SeqLM)
    assert torch.equal(found.model.encoder.embed_positions.weight, positions)
    edited(tmp_path, without("encoder_attn.k_proj.bias"))
    with pytest.raises(ModelError, match=r"needs model\.decoder\.layers\.0\.encoder_attn\.k_proj\.bias, which"):
        whole(tmp_path, AutoModelForSeq2SeqLM)
