"""Tiny random models of many architectures, able to fail a truth test: large weights, short windows, clear winners."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

VOCAB_SIZE = 264
"""256 bytes and some ids that mean nothing."""
EOS_TOKEN_ID = 256
MAX_MODEL_LEN = 512
WINDOW = 8
NUM_NEW_TOKENS = 16
"""The seeds are good for so many greedy tokens after each of the model's prompts."""
MIN_MARGIN = 1e-3
"""Between the oracle's two best logits at every step."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_NO_ATTENTION: dict[str, Any] = dict.fromkeys(
    ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
)
# What differs from COMMON; None takes a field away.
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "gpt2": {"intermediate_size": None, "num_key_value_heads": None},
    "phi3": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "gemma2": {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "olmo2": {},
    "opt": {"intermediate_size": None, "num_key_value_heads": None, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {"num_key_value_heads": None, "rotary_pct": 0.5},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 0.5, "residual_multiplier": 0.7},
    "mistral": {"sliding_window": WINDOW},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 2,
    },
}
ARCHITECTURES = tuple(_ARCHITECTURES)
# With recurrent layers: short convolutions, gated delta nets, Mamba and Mamba-2, alone, between or inside layers that attend.
_WITH_STATES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8} | _NO_ATTENTION,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "mamba": {"state_size": 8} | _NO_ATTENTION,
}
# Standard deviation of the weights where 0.2 gives texts that repeat one token.
_STD = {"gpt2": 0.4, "opt": 0.5, "gpt_neox": 0.5}
# The first with which the greedy texts after all prompts are clear and vary, where it is not 0.
_SEEDS = {"qwen2": 1, "mixtral": 1, "olmo2": 3, "gpt_neox": 1, "gpt_oss": 1, "lfm2": 1, "falcon_h1": 1, "bamba": 1}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A tiny model as a folder, with prompts for which its greedy continuation is beyond doubt."""

    architecture: str
    path: Path
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; shorter and longer than the window, some with a common beginning."""
    num_new_tokens: int


class Oracle:
    """What every other way of computing must equal: transformers' own generate in float32, with eager attention."""

    def __init__(self, model: PreTrainedModel, use_cache: bool = True) -> None:
        self._model = model.eval()
        self._use_cache = use_cache

    @classmethod
    def of(cls, path: Path, use_cache: bool = True) -> Self:
        """Models that read images or sound too are computed with all their parts."""
        config = AutoConfig.from_pretrained(path)
        auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and not config.is_encoder_decoder:
            auto = AutoModelForMultimodalLM
        return cls(auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager"), use_cache)

    def generate(self, token_ids: Sequence[int], num_tokens: int, **options: Any) -> Any:
        """What it returns for one row of input, without sampling."""
        input_ids = torch.tensor([token_ids])
        with torch.inference_mode():
            return self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=self._use_cache,
                pad_token_id=0,
                return_dict_in_generate=True,
                **options,
            )

    def logits(
        self, prompt: Sequence[int], num_tokens: int, decoder_prompt: Sequence[int] | None = None
    ) -> tuple[list[int], torch.Tensor]:
        """The greedy continuation and the logits [num_tokens, vocab_size] that each of its tokens was chosen by. With
        `decoder_prompt`, that is continued, and `prompt` is the encoder's input; no id is forced."""
        options: dict[str, Any] = {}
        if decoder_prompt is not None:
            forced = dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"))
            options = {"decoder_input_ids": torch.tensor([decoder_prompt]), "num_beams": 1, **forced}
        output = self.generate(
            prompt, num_tokens, min_new_tokens=num_tokens, eos_token_id=None, output_logits=True, **options
        )
        known = prompt if decoder_prompt is None else decoder_prompt
        tokens: list[int] = output.sequences[0, len(known) :].tolist()
        return tokens, torch.cat(output.logits)

    def beams(
        self, prompt: tuple[int, ...], num_tokens: int, *, ending_ids: Sequence[int] = (), **options: Any
    ) -> list[Beam]:
        """What `generate` finds with num_beams and other options, best first: as many texts as beams."""
        output = self.generate(
            prompt,
            num_tokens,
            eos_token_id=list(ending_ids) or None,
            num_return_sequences=options["num_beams"],
            output_scores=True,
            **options,
        )
        texts = output.sequences[:, len(prompt) :].tolist()
        return [
            Beam(_until(text, ending_ids), score)
            for text, score in zip(texts, output.sequences_scores.tolist(), strict=True)
        ]

    def margin(self, prompt: tuple[int, ...], num_tokens: int) -> float:
        """Smallest distance between the two best logits on the way."""
        _, logits = self.logits(prompt, num_tokens)
        best = logits.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())


class Beam(NamedTuple):
    """A text that a beam search has found."""

    tokens: list[int]
    """Without the id that ended it."""
    score: float


def _until(text: list[int], ending_ids: Sequence[int]) -> list[int]:
    """The text up to the id that ends it; what follows fills it up."""
    end = next((place for place, token_id in enumerate(text) if token_id in ending_ids), len(text))
    return text[:end]


def edit_json(file: Path, **fields: Any) -> None:
    """Set fields of an object in a file."""
    file.write_text(json.dumps(json.loads(file.read_bytes()) | fields))


def make_tiny_model(
    architecture: str, folder: Path, *, tokenizer: bool = False, eos_token_id: int | None = None
) -> TinyModel:
    """Save the model as safetensors into the folder (made if missing), with a tokenizer of one token per ASCII character
    if asked for. Without eos_token_id no token ends a text."""
    build_model(architecture, _SEEDS.get(architecture, 0), eos_token_id).save_pretrained(folder)
    if tokenizer:
        _save_tokenizer(folder)
    return TinyModel(architecture, folder, prompts(), NUM_NEW_TOKENS)


def prompts() -> tuple[tuple[int, ...], ...]:
    """The same for all architectures: 5 to 41 tokens, the last two share beginnings with earlier ones."""
    numbers = random.Random(7)
    short, middle, long = (tuple(numbers.randrange(VOCAB_SIZE) for _ in range(n)) for n in (5, 19, 41))
    return short, middle, long, long[:20] + middle[:7], middle[:12] + short


def build_model(architecture: str, seed: int, eos_token_id: int | None = None) -> PreTrainedModel:
    """The model with random weights of a standard deviation of 0.2 and more."""
    fields = {**COMMON, **(_ARCHITECTURES | _WITH_STATES)[architecture], "eos_token_id": eos_token_id}
    config = AutoConfig.for_model(architecture, **{k: v for k, v in fields.items() if v is not None or "_id" in k})
    with torch.random.fork_rng(devices=[]):
        # Some models draw even vectors at random (the sinks of gpt_oss); those stay, so the draw must be the same each time.
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    draw_weights(model, torch.Generator().manual_seed(seed), _STD.get(architecture, 0.2))
    model.generation_config.eos_token_id = eos_token_id
    return model


def draw_weights(model: PreTrainedModel, generator: torch.Generator | None, std: float = 0.2) -> None:
    """Give a model random weights; those of norms (vectors) stay around what they were, so that they let something through."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)


def _save_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    assert tokenizer.token_to_id("<eos>") == EOS_TOKEN_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
