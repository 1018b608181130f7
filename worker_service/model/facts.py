"""What a model's folder says of its tokenizer, and of how its texts begin."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvpool.v1 import worker_pb2

from ..engine.prompt import EncoderSettings
from .errors import ModelError, one_line
from .source.files import TOKENIZER, TOKENIZER_CONFIG, is_there, read_bytes, read_object, read_text

_STANDARD_TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}


class TokenizerFiles:
    """The tokenizer's files in a model folder; each may be missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._config = self._json(TOKENIZER_CONFIG)

    def served(self) -> dict[worker_pb2.ModelFile, bytes]:
        """The content of the files that clients are given. Raises ModelError."""
        files = {}
        tokenizer, template = self.tokenizer_json(), self.chat_template()
        special = json.dumps(self.special_tokens(), ensure_ascii=False, sort_keys=True)
        if tokenizer is not None:
            files[worker_pb2.MODEL_FILE_TOKENIZER] = tokenizer
            files[worker_pb2.MODEL_FILE_SPECIAL_TOKENS] = special.encode()
        if template is not None:
            files[worker_pb2.MODEL_FILE_CHAT_TEMPLATE] = template.encode()
        return files

    def tokenizer_json(self) -> bytes | None:
        """The content of tokenizer.json; None: there is none. Raises ModelError if the tokenizers library cannot read it."""
        return None if self._tokenizer is None else self._tokenizer[0]

    @cached_property
    def _tokenizer(self) -> tuple[bytes, Tokenizer] | None:
        """The content of tokenizer.json and what the library makes of it, which takes a large part of a second."""
        path = self.folder / TOKENIZER
        if not is_there(path):
            return None
        content = read_bytes(path)
        try:
            return content, Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing else
            raise ModelError(
                f"The tokenizers library cannot read {path}: {one_line(error)}. Fetch the file again, or save it with this release."
            ) from error

    def chat_template(self) -> str | None:
        """The file chat_template.jinja, else the config's field; of several named templates, `default`."""
        path = self.folder / "chat_template.jinja"
        if is_there(path):
            return read_text(path)
        template = self._config.get("chat_template") or self._json("chat_template.json").get("chat_template")
        if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
            template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        if template is not None and not isinstance(template, str):
            raise ModelError(
                f"{self.folder} has a chat_template that is neither text nor a list of named ones; correct its {TOKENIZER_CONFIG}."
            )
        return template

    def special_tokens(self) -> dict[str, str]:
        """The special tokens, by the names that transformers gives them in chat templates, with the model's own (image_token,
        …)."""
        # A folder that lists its added tokens needs the older file no more; without the list, the older file decides.
        older = {} if "added_tokens_decoder" in self._config else self._json("special_tokens_map.json")
        fields = {**self._config, **older}
        fields |= {name: value for name, value in self._config.items() if name not in _STANDARD_TOKENS}
        fields = {name: value for name, value in fields.items() if name.endswith("_token")}
        for source in (self._config, older):
            for extra in (source.get("model_specific_special_tokens"), source.get("extra_special_tokens")):
                fields |= extra if isinstance(extra, dict) else {}
        tokens = {name: _token_text(value) for name, value in fields.items()}
        return {name: text for name, text in tokens.items() if text is not None}

    def end_of_turn(self) -> dict[str, int]:
        """Name and id of the tokens that end a turn, where there is a chat template: the tokenizer's eos_token, or an eot_token."""
        if self._tokenizer is None or self.chat_template() is None:
            return {}
        _, tokenizer = self._tokenizer
        special = self.special_tokens()
        names = [special[name] for name in ("eos_token", "eot_token") if name in special]
        ids = {name: tokenizer.token_to_id(name) for name in names}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_object(path) if is_there(path) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_encoder_settings(generation_config: Any, config: Any, max_tokens: int, vocab_size: int) -> EncoderSettings:
    """Raises ModelError if no file of the model says how its texts begin."""
    parts = [part for part in (generation_config, config, getattr(config, "decoder", None)) if part is not None]
    # In the order of transformers' generate.
    starts = [getattr(part, name, None) for name in ("decoder_start_token_id", "bos_token_id") for part in parts]
    start = next((token for token in starts if isinstance(token, int)), None)
    if start is None:
        raise ModelError(
            "Neither config.json nor generation_config.json of this encoder-decoder model has a decoder_start_token_id, with which "
            "its texts begin."
        )
    forced = next((token for part in parts if (token := getattr(part, "forced_bos_token_id", None)) is not None), None)
    # The forced one is no choice of the model: it is generated whatever the model would choose.
    decoder_prompt = (start, forced) if isinstance(forced, int) else (start,)
    return EncoderSettings(max_tokens, vocab_size, decoder_prompt)
