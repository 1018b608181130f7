"""The class of transformers that computes a model's texts, and models of it.

A composite model reads images or sound too, with parts next to its language model. It is computed by its own class, so that texts
are its own, but without those parts, whose weights stay unread.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)

from .length import is_encoder_decoder


def is_composite(config: Any) -> bool:
    """Whether the text of a model without an encoder is only a part of its config."""
    return not is_encoder_decoder(config) and config.get_text_config(decoder=True) is not config


def find_class(config: Any) -> Any:
    """transformers' class for the texts of a model; None: it has none."""
    if is_encoder_decoder(config):
        return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(config), None)
    tables = [MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING]
    if is_composite(config):  # a class of the text alone may not find its weights in the model's files
        tables.reverse()
    classes = [cls for table in tables if (cls := table.get(type(config), None)) is not None]
    # The weights of a class for another composite config would have other names.
    parts = {type(config), type(config.get_text_config(decoder=True))}
    return next((cls for cls in classes if not is_composite(config) or cls.config_class in parts), None)


def build_language_model(config: Any, attn_implementation: str, **options: Any) -> Any:
    """The model with random weights. options: of transformers' from_config. Raises any exception."""
    attention = attention_of(config, attn_implementation)
    return class_to_load(config).from_config(config, attn_implementation=attention, **options)


def class_to_load(config: Any) -> Any:
    """A class with transformers' from_pretrained and from_config for the model's texts. Without one, what they raise says so."""
    cls = find_class(config)
    if is_encoder_decoder(config):
        return AutoModelForSeq2SeqLM
    is_of_text = cls is MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if is_of_text and not (is_composite(config) and cls is not None and cls.config_class is type(config)):
        return AutoModelForCausalLM
    return _alone(cls)


def attention_of(config: Any, name: str) -> Any:
    """How each part of the model attends; the parts that are left out do so by default, if they have a choice at all."""
    if not is_composite(config):
        return name
    text = config.get_text_config(decoder=True)
    parts = {part: getattr(config, part) for part in config.sub_configs}
    of_text = [part for part, own in parts.items() if own is not None and own.get_text_config(decoder=True) is text]
    return {"": name, **dict.fromkeys(of_text, name)}


@cache
def _alone(cls: Any) -> Any:
    """The class of a model without the parts that read anything but text."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        _leave_out_other_parts(self)

    def set_attn_implementation(self: Any, name: str) -> None:
        cls.set_attn_implementation(self, attention_of(self.config, name))

    def get_output_embeddings(self: Any) -> Any:
        # The decoder of some is a whole language model.
        return cls.get_output_embeddings(self) or self.get_decoder().get_output_embeddings()

    def from_config(own: Any, /, config: Any, **options: Any) -> Any:
        return own._from_config(config, **options)

    # By the name of the class transformers finds how to load its weights.
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__init__": __init__}
    own |= {"from_config": classmethod(from_config), "set_attn_implementation": set_attn_implementation}
    own |= {"get_output_embeddings": get_output_embeddings}
    return type(cls.__name__, (cls,), own)


def _leave_out_other_parts(model: Any) -> None:
    """Leave out all modules next to those that lead to the decoder, to its embedding and to its head; transformers then expects
    that files have weights of theirs."""
    needed = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()}
    expected = set(model._keys_to_ignore_on_load_unexpected or ())
    parts: list[tuple[str, Any]] = [("", model)]
    for path, part in parts:
        for name, child in part.named_children():
            if needed.isdisjoint(child.modules()):
                setattr(part, name, None)
                expected.add(rf"^{re.escape(path + name)}\.")
            elif child not in needed:
                parts.append((f"{path}{name}.", child))
    model._keys_to_ignore_on_load_unexpected = expected
