"""How an encoder-decoder model of transformers is called: its encoder on one input, its decoder on a packed row."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .given_positions import GivenPositions
from .layers import PlaceholderTarget, bound

_NO_LIMIT = 1 << 30
_OF_A_DECODER = {"position_ids", "encoder_hidden_states"}
"""Parameters of a decoder that takes position ids."""
_CAPACITY = "expert_capacity"


class Seq2Seq:
    """A model of the seq2seq mapping, in two halves.

    The encoder is transformers' own, with its own attention, and sees one input at a time: no padding, and positions from 0. The
    decoder gets a packed row, with the positions that `positions` is given.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.encoder: Any = model.get_encoder()
        self.positions = GivenPositions()
        own = set(self.encoder.modules())
        self.decoder_modules = {name: module for name, module in model.named_modules() if module not in own}
        """All modules that do not belong to the encoder, by name."""
        self._configs = _attention_configs(self.encoder)
        self._blank: Any = None
        """The encoder's output for a token."""
        self.positions.pass_to(self._decoders_with_position_ids())
        _let_every_token_in(self.decoder_modules.values())

    @property
    def num_encoder_ids(self) -> int:
        """The encoder's token ids are 0 … this − 1."""
        return int(self.encoder.get_input_embeddings().num_embeddings)

    def encode(self, input_ids: torch.Tensor) -> Any:
        """The encoder's output for one input [1, L], as the model takes it; its first field is [1, L, size]. On the meta device
        without attention, whose masks need values."""
        if input_ids.is_meta:
            with bound(self.encoder.modules(), PlaceholderTarget()):
                return self.encoder(input_ids=input_ids, use_cache=False)
        with self._own_attention():
            # Without a mask some encoders make one that hides tokens with the id of the padding.
            return self.encoder(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))

    def blank_output(self, num_tokens: int, device: torch.device) -> Any:
        """An output of the encoder that is zero, [1, num_tokens, size]."""
        if self._blank is None:
            with torch.inference_mode():
                self._blank = self.encode(torch.zeros(1, 1, dtype=torch.int64, device=device))
        states = torch.zeros_like(self._blank[0]).repeat(1, num_tokens, 1)
        return type(self._blank)(last_hidden_state=states)

    def inputs(self, input_ids: torch.Tensor, encoder_output: Any) -> dict[str, Any]:
        """Arguments of the model for a row of the decoder [1, T]; to be called within `positions.at`."""
        return {"decoder_input_ids": input_ids, "encoder_outputs": encoder_output, "use_cache": False}

    def decode(self, input_ids: torch.Tensor, position_ids: torch.Tensor, encoder_output: Any) -> torch.Tensor:
        """The logits of a row [1, T, vocab_size], with the attention that the modules are bound to."""
        with self.positions.at(position_ids):
            logits: torch.Tensor = self.model(**self.inputs(input_ids, encoder_output)).logits
        return logits

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """Let the modules use transformers' own attention inside. Encoder and decoder of some models have the same config."""
        before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = "eager"
        try:
            yield
        finally:
            for config, earlier in zip(self._configs, before, strict=True):
                config._attn_implementation = earlier

    def _decoders_with_position_ids(self) -> list[torch.nn.Module]:
        """The outermost of the decoder's modules that take position ids with the encoder's output, if any. Modules around the
        encoder take the positions of its input."""
        prefix = next(name for name, module in self.model.named_modules() if module is self.encoder)
        around = {name for name in self.decoder_modules if not name or prefix.startswith(f"{name}.")}
        taking = (
            module
            for name, module in self.decoder_modules.items()
            if name not in around and inspect.signature(module.forward).parameters.keys() >= _OF_A_DECODER
        )
        return list(taking)[:1]


def _attention_configs(module: torch.nn.Module) -> list[Any]:
    """The configs from which the modules take their attention implementation."""
    configs = [getattr(each, "config", None) for each in module.modules()]
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


def _let_every_token_in(modules: Any) -> None:
    """Routers of some mixtures of experts drop the tokens of a row that one expert gets too many of. `generate` gives a decoder one
    token at a time and so drops none; of a packed row the last sequences would be dropped."""
    for module in modules:
        if isinstance(getattr(module, _CAPACITY, None), int):
            setattr(module, _CAPACITY, _NO_LIMIT)
