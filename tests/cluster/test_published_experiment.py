"""The published experiment, through client, manager and worker: who shares which block, as the block map tells it.

Every test uses a tenant of its own, so it meets an empty cache however much others have left.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
import xxhash

from kvpool.client import Completion, GenerateStream
from kvpool.v1 import cache_pb2
from tests.cluster.cluster import Cluster
from tests.cluster.tiny_cluster import TinyCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK_SIZE = 4
Prompt = Sequence[int] | str


class Tenant:
    """One tenant's view of one worker: asks for one token at a time, and sees which blocks that has sealed."""

    def __init__(self, cluster: Cluster, worker: str, salt: str) -> None:
        self._cluster = cluster
        self._worker = worker
        self.salt = salt
        self._sealed_before: set[tuple[int, int]] = set()

    async def start(self) -> None:
        """Remember what is sealed already."""
        self._sealed_before = {(block.block_id, block.generation) for block in await self._all_sealed()}

    async def ask(self, prompt: Prompt) -> Completion:
        """One token behind the prompt; returns when all its blocks are free again."""
        completion = await self._cluster.complete(prompt, model=self._worker, max_tokens=1, tenant_salt=self.salt)
        await self._cluster.until_clean()
        return completion

    async def num_cached(self, prompt: Prompt) -> int:
        """Tokens of the prompt that the cache served."""
        return (await self.ask(prompt)).num_cached_tokens

    async def sealed(self) -> list[cache_pb2.BlockDescription]:
        """Blocks sealed since the start, by their place in the chain."""
        found = [b for b in await self._all_sealed() if (b.block_id, b.generation) not in self._sealed_before]
        return sorted(found, key=lambda block: block.table_index)

    async def _all_sealed(self) -> list[cache_pb2.BlockDescription]:
        return [block for block in (await self._cluster.worker(self._worker)).blocks if block.sealed]


@pytest_asyncio.fixture(loop_scope="session")
async def tenant(tiny: TinyCluster, request: pytest.FixtureRequest) -> AsyncIterator[Tenant]:
    """On the worker with 1,024 blocks and a tokenizer of one token per character."""
    tenant = Tenant(tiny.cluster, TinyCluster.ROOMY, request.node.name)
    await tenant.start()
    yield tenant


@pytest_asyncio.fixture(loop_scope="session")
async def small(tiny: TinyCluster, request: pytest.FixtureRequest) -> Tenant:
    """On the worker with room for 3 blocks; they hold what the last test has left."""
    return Tenant(tiny.cluster, TinyCluster.SMALL, request.node.name)


THE_CAT, THE_DOG, THE_MAT = [1, 2, 3, 4], [1, 9, 3, 4], [1, 5, 6, 7]
A = list(range(1, 9))


@pytest.mark.parametrize(
    ("asked", "sealed"),
    [
        # Eighteen tokens twice are four entries: nothing is kept twice.
        ([(list(range(18)), 0), (list(range(18)), 16)], [0, 1, 2, 3]),
        # 12 characters in common, one token each; the fourth block is never full.
        ([("Hello world cat", 0), ("Hello world dog", 12)], [0, 1, 2]),
        # "The cat sat on|the mat.!" and "The dog sat on|the mat.!", one token a word: equal blocks after different ones are
        # two entries, and each is found after its own parent.
        (
            [
                (THE_CAT + THE_MAT, 0),
                (THE_DOG + THE_MAT, 0),
                ([*THE_CAT, *THE_MAT, 8], 8),
                ([*THE_DOG, *THE_MAT, 8], 8),
            ],
            [0, 0, 1, 1],
        ),
        # 22 and 20 tokens with nothing in common: no hit, five blocks each; a third request hits either set.
        (
            [
                (list(range(22)), 0),
                (list(range(100, 120)), 0),
                ([*range(20), 200], 20),
                ([*range(100, 120), 200], 20),
            ],
            [0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
        ),
        # A full hit still computes its last block.
        ([(list(range(16)), 0), (list(range(16)), 12), (list(range(16)), 12)], [0, 1, 2, 3]),
        # A longer prompt reuses both blocks; a different first token is a different prefix.
        ([(A, 0), ([*A, 9, 10], 8), ([0, *A[1:], 9, 10], 0)], [0, 0, 1, 1]),
    ],
    ids=["eighteen-tokens", "hello-world", "the-cat-and-the-dog", "nothing-in-common", "full-hit", "first-token"],
)
async def test_what_is_shared_is_kept_once_and_served(
    tenant: Tenant, asked: list[tuple[Prompt, int]], sealed: list[int]
) -> None:
    """Each prompt with the tokens that the cache serves of it, and the places in their chains of all blocks sealed."""
    for prompt, num_cached in asked:
        assert await tenant.num_cached(prompt) == num_cached
    blocks = await tenant.sealed()
    assert [block.table_index for block in blocks] == sealed
    assert len({block.block_hash for block in blocks}) == len(sealed)
    assert {block.state for block in blocks} == {cache_pb2.BLOCK_STATE_CACHED}


async def test_a_block_is_named_after_its_tokens_and_its_parents_name(tenant: Tenant) -> None:
    """xxh64(parent's name as 8 little-endian bytes ‖ tokens as little-endian uint32)."""
    prompt = list(range(50, 66))
    await tenant.ask(prompt)
    sealed = await tenant.sealed()
    for index in range(1, 4):
        data = struct.pack("<Q4I", sealed[index - 1].block_hash, *prompt[4 * index : 4 * index + 4])
        assert sealed[index].block_hash == xxhash.xxh64_intdigest(data)


async def test_of_four_unrelated_blocks_the_last_three_remain(tiny: TinyCluster, small: Tenant) -> None:
    """Room for three: each new one takes the place of the one that was used least recently."""
    prompts = [[10 * index + offset for offset in range(4)] for index in range(4)]
    for prompt in prompts:
        assert await small.num_cached(prompt) == 0
    assert await cached_prefixes(tiny, small, prompts) == [0, 4, 4, 4]


async def test_a_chain_under_pressure_of_one_block_loses_its_tail(tiny: TinyCluster, small: Tenant) -> None:
    """A prefix outlives its continuations, because more prompts can begin with it."""
    chain = list(range(12))
    assert await small.num_cached(chain) == 0
    assert await cached_prefixes(tiny, small, [chain]) == [12]
    assert await small.num_cached([100, 101, 102, 103]) == 0
    assert await cached_prefixes(tiny, small, [chain]) == [8]


async def cached_prefixes(tiny: TinyCluster, tenant: Tenant, prompts: Sequence[list[int]]) -> list[int]:
    """How much of each prompt the worker holds; asking leaves the order of eviction as it is."""
    async with tiny.cluster.client() as client:
        fingerprint = (await client.model(TinyCluster.SMALL)).fingerprint
        answers = [
            await client.route([*prompt, 200], model_fingerprint=fingerprint, tenant_salt=tenant.salt)
            for prompt in prompts
        ]
    return [answer.workers[0].num_cached_tokens for answer in answers]


async def test_two_live_chats_hold_their_common_blocks_together(tiny: TinyCluster, tenant: Tenant) -> None:
    """Four blocks each, three equal: the tables share these with ref counts 2, 2, 2; the tails are their own."""
    common = list(range(30, 42))
    cluster = tiny.cluster
    async with cluster.client() as client:

        def chat(*tail: int) -> GenerateStream:
            return client.generate([*common, *tail], model=TinyCluster.ROOMY, max_tokens=1500, tenant_salt=tenant.salt)

        async with chat(1, 2, 3, 4) as one, chat(5, 6, 7, 8) as other:
            for stream in (one, other):
                while not (await anext(stream)).token_ids:
                    pass
            # Both are far from their end; frozen, they cannot reach it while we look.
            cluster.suspend(TinyCluster.ROOMY)
            try:
                blocks = (await cluster.worker(TinyCluster.ROOMY)).blocks
            finally:
                cluster.resume(TinyCluster.ROOMY)
            held = [block for block in blocks if block.state == cache_pb2.BLOCK_STATE_HELD and block.table_index < 4]
            both = {one.sequence_id, other.sequence_id}
            counts = sorted((block.table_index, block.ref_count) for block in held)
            assert counts == [(0, 2), (1, 2), (2, 2), (3, 1), (3, 1)]
            owners = {block.table_index: {key.sequence_id for key in block.owners} for block in held}
            assert owners[0] == owners[1] == owners[2] == both
            assert {key.sequence_id for block in held if block.table_index == 3 for key in block.owners} == both
    await cluster.until_clean()
