"""A kvpool cluster under load, by way of the client library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.errors import ResourceExhausted
from kvpool.client.model import Model
from kvpool.client.options import GenerateOptions
from kvpool.client.request import build_request

from .engine import Delivery, RefusedRequest, ServedRequest
from .waste import WasteSample, look


class KvpoolEngine:
    """Each request is one `Client.generate`: tokens in, tokens out; routing and gRPC are in its times."""

    def __init__(self, config: ClientConfig, *, model: str | None = None, priority: int = 0, tenant: str = "") -> None:
        """All requests are for that model, of that priority and that tenant. Raises InvalidRequest if there can be no such."""
        self._options: GenerateOptions = {"ignore_eos": True, "model": model, "priority": priority, "tenant": tenant}
        build_request(self._options)  # once, and not with the first request
        self._client = Client(config=config)
        self._model_name = model
        self._lengths: dict[str, int] = {}
        """Tokens of the sequences since the last `forget`, prompt and answer so far."""

    async def served(self) -> ServedRequest:
        """Of the live workers; Unavailable or NotFound if there is none."""
        model = await self._client.model(self._model_name)
        return ServedRequest(model.name, await asyncio.to_thread(ordinary_tokens, model), model.max_model_len)

    async def generate(self, prompt: Sequence[int], num_tokens: int) -> AsyncGenerator[Delivery, None]:
        """See Engine; raises KvpoolError for what is not Refused."""
        options: GenerateOptions = {**self._options, "max_tokens": num_tokens}
        stream = self._client.generate(prompt, **options)
        length = self._lengths[stream.sequence_id] = len(prompt)
        try:
            async with stream:
                async for chunk in stream:
                    length += len(chunk.token_ids)
                    self._lengths[stream.sequence_id] = length
                    cached = None if chunk.usage is None else chunk.usage.num_cached_tokens
                    if chunk.token_ids or cached is not None:
                        yield Delivery(chunk.token_ids, cached)
        except ResourceExhausted as error:
            raise RefusedRequest(str(error)) from error

    async def waste(self) -> WasteSample:
        """What its sequences hold right now."""
        workers = (await self._client.describe()).workers
        return await look(self._client, sorted(worker.worker_id for worker in workers), self._lengths)

    def forget(self) -> None:
        """The sequences so far have ended."""
        self._lengths.clear()

    async def close(self) -> None:
        """Close its connections. May be repeated."""
        await self._client.close()


def ordinary_tokens(model: Model) -> list[int]:
    """Ids to make prompts of: all of the vocabulary but special tokens, added ones and ends of text."""
    special = set(model.eos_token_ids)
    if model.tokenizer is not None:
        special |= set(model.tokenizer.get_added_tokens_decoder())
    return [token for token in range(model.vocab_size) if token not in special]
