"""A kvpool cluster under load, called through the client library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from kvpool.client.block_map import fetch_block_map
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.errors import ResourceExhausted
from kvpool.client.model import Model
from kvpool.client.options import GenerateOptions
from kvpool.client.request import build_request

from .engine import Delivery, RefusedRequest, ServedRequest
from .waste import WasteSample, waste_of


class KvpoolEngine:
    """Sends each request as one `Client.generate`, tokens in and tokens out. The times include routing and gRPC."""

    def __init__(self, config: ClientConfig, *, model: str | None = None, priority: int = 0, tenant: str = "") -> None:
        """All requests have this model, priority and tenant. Raises InvalidRequest if these can never be accepted."""
        self._options: GenerateOptions = {"ignore_eos": True, "model": model, "priority": priority, "tenant": tenant}
        build_request(self._options)  # refuses wrong options here, before the first request
        self._client = Client(config=config)
        self._model_name = model
        self._lengths: dict[str, int] = {}
        """Tokens of each sequence since the last `forget`, prompt and answer so far."""

    async def served(self) -> ServedRequest:
        """Return the facts about the live workers' model. Unavailable or NotFound if there is no worker."""
        model = await self._client.model(self._model_name)
        return ServedRequest(model.name, await asyncio.to_thread(ordinary_tokens, model), model.max_model_len)

    async def generate(self, prompt: Sequence[int], num_tokens: int) -> AsyncGenerator[Delivery, None]:
        """See EngineUnderLoad.generate. Raises RefusedRequest if the workers are full, KvpoolError for all other errors."""
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
        """Return the slots that the sequences hold now. The workers are asked one after the other; a pool of more than 4,096 blocks
        is read in pages, milliseconds apart."""
        workers = (await self._client.describe()).workers
        samples = [waste_of(await fetch_block_map(self._client, worker.worker_id), self._lengths) for worker in workers]
        return WasteSample(*(sum(column) for column in zip(*samples, strict=True)))

    def forget(self) -> None:
        """Forget the sequences so far, which have ended."""
        self._lengths.clear()

    async def close(self) -> None:
        """Close the client's connections. May be repeated."""
        await self._client.close()


def ordinary_tokens(model: Model) -> list[int]:
    """Return the ids that prompts can be made of: the vocabulary without special tokens, added ones and ends of text."""
    special = set(model.eos_token_ids)
    if model.tokenizer is not None:
        special |= set(model.tokenizer.get_added_tokens_decoder())
    return [token for token in range(model.vocab_size) if token not in special]
