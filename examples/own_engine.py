"""An engine of your own: a toy transformer in numpy with KV blocks granted by a kvpool manager (docs/PROTOCOL.md).

Four texts at once with a common prefix: Allocate a block table, compute uncached tokens, Append (`want_blocks`: no reserve), Free.
"""

import argparse
import asyncio
import functools
import os
import time
from typing import Any

import grpc
import numpy as np

from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2

STORY = "Once upon a time there was a cache that kept what it had read. "
PROMPTS = [STORY + end for end in ("It forgot", "It shared its blocks with", "And so", "Then came a prompt:")]
SIZE, LAYERS, DIM, VOCAB = 8, 2, 24, 95  # token slots of a block; layers; width; printable characters of ASCII
ROOT = common_pb2.Root(model_fingerprint="own-engine-1")  # names all that determines the KV, e.g. the weights
random = np.random.default_rng(7)
EMBEDDING, HEAD = random.normal(size=(VOCAB, DIM)), random.normal(size=(DIM, VOCAB))
WEIGHTS = random.normal(size=(LAYERS, 4, DIM, DIM)) / DIM**0.5  # query, key, value, output


def forward(kv: Any, table: Any, tokens: Any, first: int) -> Any:
    """Logits after each token from position `first` on. Writes their KV into the table's blocks, and reads all KV there."""
    positions = np.arange(len(tokens))
    block, slot, new = table[positions // SIZE], positions % SIZE, positions[first:]
    x = EMBEDDING[tokens[new]] + np.sin(new[:, None] / 50 ** (np.arange(DIM) / DIM) + np.arange(DIM))
    for layer, (query, key, value, output) in enumerate(WEIGHTS):
        kv[block[new], slot[new], layer] = np.stack([x @ key, x @ value], axis=1)
        keys, values = kv[block, slot, layer].swapaxes(0, 1)
        weights = np.exp(x @ query @ keys.T / DIM) * (positions <= new[:, None])
        x = x + weights / weights.sum(axis=1, keepdims=True) @ values @ output
    return x @ HEAD


class Blocks:
    """A pool: KV; and per block the generation of its grant, that when it was filled, and its number of tables."""

    def __init__(self, num_blocks: int, num_layers: int = LAYERS) -> None:
        self.kv = np.full((num_blocks, SIZE, num_layers, 2, DIM), np.nan)  # NaN in a text: an unwritten slot was read
        self.stamp, self.filled, self.users = np.zeros((3, num_blocks), np.int64)

    def enter(self, run: common_pb2.BlockRun, num_hits: int = 0) -> Any:
        """Blocks for a table. A hit must be filled under its generation; a grant must be newer, its block not in use."""
        blocks, stamps = np.array(run.block_ids, int), np.array(run.generations, np.int64)
        hits = (self.filled[blocks] == stamps) & (self.stamp[blocks] == stamps)
        grants = (self.stamp[blocks] < stamps) & (self.users[blocks] == 0)
        if not np.where(np.arange(len(blocks)) < num_hits, hits, grants).all():
            raise RuntimeError("the manager and this engine disagree on a block: writes are unsafe")
        self.stamp[blocks], self.users[blocks] = stamps, self.users[blocks] + 1
        return blocks


class Engine:
    """Blocks, and the link to the manager."""

    def __init__(self, stub: cache_pb2_grpc.CacheServiceStub, hello: pb.RegisterResponse, num_blocks: int) -> None:
        self.who = dict[str, Any](session=hello.session, session_key=hello.session_key)  # the key is a secret
        self.blocks = Blocks(num_blocks)
        self.stub, self.uplink, self.one_call, self.stopped = stub, pb.Uplink(**self.who), asyncio.Lock(), set[str]()

    async def keep_lease(self, seconds: float) -> None:
        beat = pb.KeepAliveRequest(**self.who, answer_ack=0)  # without an answer to acknowledge, it renews no lease
        while True:
            sent = self.stub.KeepAlive(beat, timeout=2)  # errors and the downlink are repeated in the next call
            if await sent.code() is grpc.StatusCode.OK:
                beat.answer_ack = (await sent).number
            await asyncio.sleep(seconds)

    async def call(self, rpc: Any, request: Any, name: str) -> Any:
        """The one mutating call in flight. If unanswered, it is sent again under a larger number."""
        async with self.one_call:
            for _ in range(6):
                self.uplink.call_no += 1
                request.uplink.CopyFrom(self.uplink)
                sent = rpc(request, timeout=2)
                if await sent.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    break
                await asyncio.sleep(0.2)
            answer = await sent
            for entry in answer.downlink.entries:
                if entry.number > self.uplink.downlink_ack:  # repeated until it is acknowledged
                    self.uplink.downlink_ack = entry.number
                    self.apply(entry)
            for result in getattr(answer, "results", ()):  # Free has none: it never fails
                if result.status.code not in (0, 8) and name not in self.stopped:  # 8: RESOURCE_EXHAUSTED
                    raise RuntimeError(result.status.message)
            return answer

    def apply(self, entry: pb.DownlinkEntry) -> None:
        """An order of the manager. No grants, since it states no wishes; `drain`: it ends anyway."""
        self.stopped.add(entry.stop.sequence_id)

    async def generate(self, prompt: str, max_tokens: int) -> tuple[Any, Any, Any, list[int]]:
        """Returns all tokens, the logits of the last one, the last block table, and the cached tokens of each round."""
        tokens, end, cached = np.array([*prompt.encode()], "<u4") - 32, len(prompt) + max(1, max_tokens), list[int]()
        name = f"{self.uplink.session:x} {prompt}"
        while len(tokens) < end and name not in self.stopped:  # one round, or more if the pool is full
            key = common_pb2.SequenceKey(sequence_id=name, attempt=1, round=len(cached))
            want = pb.AllocateItem(key=key, root=ROOT, tokens=tokens.tobytes(), max_new_tokens=end - len(tokens))
            result = (await self.call(self.stub.Allocate, pb.AllocateRequest(items=[want]), name)).results[0]
            if not result.HasField("granted"):  # `wait`: another text is computing this prefix; or no blocks
                await asyncio.sleep(0.02)
                continue
            computed = sealed = result.granted.num_cached_tokens
            table, has_room = self.blocks.enter(result.granted.tables[0], computed // SIZE), True
            cached.append(computed)
            while has_room and len(tokens) < end and name not in self.stopped:
                logits, computed = forward(self.blocks.kv, table, tokens, computed)[-1], len(tokens)
                tokens = np.append(tokens, np.uint32(logits.argmax()))
                full, stamp = table[: computed // SIZE], self.blocks.stamp
                self.blocks.filled[full] = stamp[full]
                # The whole state of the sequence: repetition is harmless. Efficient engines omit what was acknowledged.
                run = common_pb2.BlockRun(tier=common_pb2.TIER_DEVICE, block_ids=table, generations=stamp[table])
                state = pb.SequenceUpdate(key=key, tokens=tokens.tobytes(), num_computed_tokens=computed, bound=[run])
                if computed - sealed >= SIZE and len(tokens) < end:  # full blocks, now cached for others
                    item = pb.AppendItem(update=state, want_blocks=-(-len(tokens) // SIZE))
                    result = (await self.call(self.stub.Append, pb.AppendRequest(items=[item]), name)).results[0]
                    has_room, sealed = not result.status.code, result.num_sealed_tokens
                    table = np.concatenate([table, *map(self.blocks.enter, result.tables)])
                await asyncio.sleep(0)
            self.blocks.users[table] -= 1  # before the call: the blocks may be granted again before its reply
            await self.call(self.stub.Free, pb.FreeRequest(items=[pb.FreeItem(update=state)]), name)
        return tokens, logits, table, cached


async def generate_all(manager: str, hello: pb.RegisterRequest, new_engine: Any, max_tokens: int) -> Any:
    """All texts at once, in a session of their own. `new_engine`: the engine of a stub and a session."""
    hello.incarnation, hello.register_no = time.time_ns(), 1  # no address: it serves no text
    hello.worker_id = f"own-engine-{hello.incarnation}"
    async with grpc.aio.insecure_channel(manager, options=[("grpc.enable_retries", 0)]) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        session = await stub.Register(hello, timeout=5)
        engine = new_engine(stub, session)
        lease = asyncio.create_task(engine.keep_lease(session.keep_alive_interval_ms / 1000))
        try:
            return await asyncio.gather(*(engine.generate(prompt, max_tokens) for prompt in PROMPTS))
        finally:
            lease.cancel()
            await stub.Deregister(pb.DeregisterRequest(**engine.who), timeout=2).code()


def tell(texts: Any, without_cache: Any) -> None:
    """Print the texts, if they are those of the model without a cache. `without_cache`: logits after each token of a text."""
    for prompt, (tokens, logits, table, cached) in zip(PROMPTS, texts, strict=True):
        alone = without_cache(tokens[:-1])
        if [*alone.argmax(axis=1)[len(prompt) - 1 :]] != [*tokens[len(prompt) :]] or not np.allclose(alone[-1], logits):
            raise RuntimeError(f"without the cache, {prompt!r} has another text")
        print(f"{prompt!r} -> {bytes([*tokens[len(prompt) :] + 32]).decode()!r}, the same as without the cache")
        print(f"  block table {table.tolist()}, cached tokens in each round {cached}")


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--manager", default=os.environ.get("KVPOOL_MANAGER", "127.0.0.1:50051"), help="host:port")
    parser.add_argument("--num-blocks", type=int, default=64, help=f"of {SIZE} tokens each, the null block included")
    parser.add_argument("--max-tokens", type=int, default=40, help="to generate for each prompt")
    return parser


def run(main: Any) -> None:
    """Errors in one line."""
    try:
        asyncio.run(main())
    except (KeyboardInterrupt, RuntimeError, grpc.aio.AioRpcError) as error:
        why = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error) or "interrupted"
        raise SystemExit(f"own_engine: {why}") from None


async def main() -> None:
    args = arguments("Texts of a toy model with KV blocks granted by a kvpool manager.").parse_args()
    hello = pb.RegisterRequest(model_name="toy of own_engine.py", model_fingerprint=ROOT.model_fingerprint)
    hello.kv_cache_config.block_size = SIZE
    hello.kv_cache_config.groups.add(full_attention=common_pb2.FullAttentionSpec())
    hello.kv_cache_config.pools.add(tier=common_pb2.TIER_DEVICE, num_blocks=args.num_blocks)
    new_engine = functools.partial(Engine, num_blocks=args.num_blocks)
    texts = await generate_all(args.manager, hello, new_engine, args.max_tokens)
    tell(texts, lambda tokens: forward(Blocks(len(tokens)).kv, np.arange(len(tokens)), tokens, 0))


if __name__ == "__main__":
    run(main)
