"""What a sliding window changes in an engine of your own (docs/PROTOCOL.md, Windows). The rest is in own_engine.py.

The first layer of the toy sees the whole text, the second one its last tokens. So there are two groups with a pool each: a table of
blocks in the first, and in the second a ring of scratch blocks, of which windows are named where other texts go on.

    python -m examples.own_engine_windows

A window has 20 tokens, a block 8, a step at most 16: a boundary needs 3 blocks, a ring has 6. This is what the engine states of
group 1 for a prompt of 72 tokens and 40 generated ones, while another prompt waits that has the first 63 of them:

| call, `num_computed_tokens` | entries in `bound` | blocks in `scratch` | entries in `released` | |
|---|---|---|---|---|
| Append 16 | | 6 | | `Granted` had the boundary 64; 56, where the other prompt leaves it, came on the downlink |
| Append 32 | | 6 | | |
| Append 48 | | 6 | | the first blocks have been written again, and no message said so |
| Append 64 | 4, 5, 6, 7 | 6 | | windows end at 56 (4 to 6) and 64 (5 to 7); 4 blocks of the reserve take their place |
| Append 72 | 5, 6, 7 | 6 | 4 | the step after 64 tokens sees 5 to 7; entry 4 stays a hit for others |
| Append 80 | 6, 7 | 6 | 5 | from here on it decodes |
| Append 88 | 7 | 6 | 6 | |
| Append 96 | | 6 | 7 | |
| Append 104 | | 6 | | |
| Free 111 | 10, 11, 12 | 3 | | the window at the end of the text: a conversation goes on from there |

After the fourth call the other prompt is asked for again, and hits 56 tokens: seven blocks of group 0, and entries 4, 5
and 6 of group 1.
"""

import asyncio
import functools
from typing import Any

import numpy as np

from examples import own_engine
from examples.own_engine import DIM, EMBEDDING, HEAD, SIZE, WEIGHTS, Blocks
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2

WINDOW, CHUNK = 20, 16  # tokens that the second layer sees; tokens that a step computes at most
SPAN = -(-(WINDOW - 1) // SIZE)  # blocks before a boundary that the token after it sees
RING = -(-(CHUNK - 1) // SIZE) + 1 + SPAN  # blocks that a step can fill, wherever it begins, and those that it sees
ROOT = common_pb2.Root(model_fingerprint="own-engine-windows-1")


def forward(pools: list[Any], tables: list[Any], tokens: Any, first: int) -> Any:
    """Logits after each token from position `first` on. Of group 1 it reads no block that has left the window."""
    x = EMBEDDING[tokens[first:]] + np.sin(
        np.arange(first, len(tokens))[:, None] / 50 ** (np.arange(DIM) / DIM) + np.arange(DIM)
    )
    for (query, key, value, output), kv, table, window in zip(
        WEIGHTS, pools, tables, (len(tokens), WINDOW), strict=True
    ):
        positions = np.arange(max(0, first - window + 1), len(tokens))
        block, slot, new = table[positions // SIZE], positions % SIZE, positions[positions >= first]
        kv[table[new // SIZE], new % SIZE, 0] = np.stack([x @ key, x @ value], axis=1)
        keys, values = kv[block, slot, 0].swapaxes(0, 1)
        distance = new[:, None] - positions
        weights = np.exp(x @ query @ keys.T / DIM) * ((distance >= 0) & (distance < window))
        x = x + weights / weights.sum(axis=1, keepdims=True) @ values @ output
    return x @ HEAD


class Ring:
    """What a text has in group 1: scratch blocks, which are written in turn, and named ones, which never are."""

    def __init__(self, pool: Blocks, granted: pb.Granted, max_blocks: int) -> None:
        self.pool, self.table = (
            pool,
            np.zeros(max_blocks, int),
        )  # by index in the text; 0: it has nothing there any more
        self.named, self.placed, self.free = dict[int, int](), dict[int, int](), list[int]()
        self.released, self.boundaries = list[tuple[int, int]](), {*granted.boundaries}
        for run in (run for run in granted.tables if run.group == 1):
            hits = pool.enter(run, len(run.block_ids))
            self.named |= {run.start_index + i: int(block) for i, block in enumerate(hits)}
            self.table[[*self.named]] = [*self.named.values()]
        for run in granted.scratch:
            self.free += pool.enter(run).tolist()

    def turn(self, first: int, end: int) -> None:
        """A step computes the tokens first … end − 1: take back what none of them sees, and give each block of theirs a place."""
        for index in [index for index in self.placed if index < first // SIZE - SPAN]:
            self.free.append(self.placed.pop(index))
        for index in [index for index in self.named if index < first // SIZE - SPAN]:
            self.release(index, self.named.pop(index))
        for index in range(first // SIZE, -(-end // SIZE)):
            if index not in self.placed:
                self.table[index] = self.placed[index] = self.free.pop()

    def name(self, boundary: int, reserve: list[int] | None) -> None:
        """Name the window that ends at a boundary, in tokens. If the text goes on, blocks of the reserve replace it (None: it has
        ended). Where that cannot be, or the window is not whole any more, a hit is lost, and nothing else."""
        end = boundary // SIZE
        window = range(max(0, end - SPAN), end)
        indexes = [index for index in window if index in self.placed]
        if any(index not in self.placed and index not in self.named for index in window):
            return
        if reserve is not None:
            if len(reserve) < len(indexes):
                return
            self.free += [reserve.pop() for _ in indexes]
        self.named |= {index: self.placed.pop(index) for index in indexes}
        blocks = [self.named[index] for index in indexes]
        self.pool.filled[blocks] = self.pool.stamp[blocks]  # complete, and never written again: a hit for others

    def release(self, index: int, block: int) -> None:
        """This text does not use the block any more; others may."""
        self.released.append((index, block))
        self.pool.users[block] -= 1

    def state(self) -> pb.SequenceUpdate:
        """What an update says of it: everything, though it may have been said before."""
        scratch = (*self.placed.values(), *self.free)
        return pb.SequenceUpdate(
            bound=[self.run(index, block) for index, block in self.named.items()],
            scratch=[self.run(0, block) for block in scratch],
            released=[self.run(index, block) for index, block in self.released],
        )

    def run(self, index: int, block: int) -> common_pb2.BlockRun:
        where = common_pb2.BlockRun(group=1, tier=common_pb2.TIER_DEVICE, start_index=index)
        where.block_ids.append(block)
        where.generations.append(self.pool.stamp[block])
        return where

    def leave(self) -> None:
        """The text has ended, or begins another round."""
        self.pool.users[[*self.named.values(), *self.placed.values(), *self.free]] -= 1


class Engine(own_engine.Engine):
    """Generates texts in the blocks of two pools."""

    def __init__(
        self, stub: cache_pb2_grpc.CacheServiceStub, hello: pb.RegisterResponse, num_blocks: int, num_window_blocks: int
    ) -> None:
        super().__init__(stub, hello, num_blocks)
        self.blocks, self.windows = Blocks(num_blocks, 1), Blocks(num_window_blocks, 1)
        self.reserve, self.rings = list[int](), dict[str, Ring]()
        # To replace what is named; of a small pool what a text and a window that it hits leave.
        wish = max(0, min(2 * SPAN, num_window_blocks - 1 - RING - SPAN))
        self.uplink.reserve_wishes.add(group=1, tier=common_pb2.TIER_DEVICE, num_blocks=wish)

    def apply(self, entry: pb.DownlinkEntry) -> None:
        super().apply(entry)
        self.reserve += self.windows.enter(entry.grant).tolist()
        if entry.boundary.key.sequence_id in self.rings:  # another prompt parts from that text there, and waits
            self.rings[entry.boundary.key.sequence_id].boundaries.add(entry.boundary.num_tokens)

    async def generate(self, prompt: str, max_tokens: int) -> tuple[Any, Any, Any, list[int]]:
        tokens, end, cached = np.array([*prompt.encode()], "<u4") - 32, len(prompt) + max(1, max_tokens), list[int]()
        name = f"{self.uplink.session:x} {prompt}"
        while len(tokens) < end and name not in self.stopped:
            key = common_pb2.SequenceKey(sequence_id=name, attempt=1, round=len(cached))
            want = pb.AllocateItem(key=key, root=ROOT, tokens=tokens.tobytes(), max_new_tokens=end - len(tokens))
            result = (await self.call(self.stub.Allocate, pb.AllocateRequest(items=[want]), name)).results[0]
            if not result.HasField("granted"):
                await asyncio.sleep(0.02)
                continue
            computed = sealed = result.granted.num_cached_tokens
            table, has_room = self.blocks.enter(result.granted.tables[0], computed // SIZE), True
            ring = self.rings[name] = Ring(self.windows, result.granted, -(-end // SIZE))
            cached.append(computed)
            while has_room and len(tokens) < end and name not in self.stopped:
                until = min(computed + CHUNK, len(tokens))  # the ring has room for no more in one step
                ring.turn(computed, until)
                logits = forward([self.blocks.kv, self.windows.kv], [table, ring.table], tokens[:until], computed)[-1]
                computed, full = until, table[: until // SIZE]
                self.blocks.filled[full] = self.blocks.stamp[full]
                if computed == len(tokens):
                    tokens = np.append(tokens, np.uint32(logits.argmax()))
                for boundary in sorted(one for one in ring.boundaries if one <= computed):
                    ring.boundaries.remove(boundary)
                    ring.name(boundary, self.reserve)
                if computed - sealed >= SIZE and len(tokens) < end:  # full blocks, and windows that were named
                    state = self.state(key, tokens, computed, table, ring)
                    item = pb.AppendItem(update=state, want_blocks=-(-len(tokens) // SIZE))
                    result = (await self.call(self.stub.Append, pb.AppendRequest(items=[item]), name)).results[0]
                    has_room, sealed = not result.status.code, result.num_sealed_tokens
                    if has_room:
                        ring.released.clear()
                    table = np.concatenate([table, *map(self.blocks.enter, result.tables)])
                await asyncio.sleep(0)
            ring.name(computed, None)  # a conversation goes on from here
            state = self.state(key, tokens, computed, table, ring)
            self.blocks.users[table] -= 1
            self.rings.pop(name).leave()
            await self.call(self.stub.Free, pb.FreeRequest(items=[pb.FreeItem(update=state)]), name)
        return tokens, logits, table, cached

    def state(
        self, key: common_pb2.SequenceKey, tokens: Any, computed: int, table: Any, ring: Ring
    ) -> pb.SequenceUpdate:
        """The whole state of a text, in both groups."""
        run = common_pb2.BlockRun(tier=common_pb2.TIER_DEVICE, block_ids=table, generations=self.blocks.stamp[table])
        state = pb.SequenceUpdate(key=key, tokens=tokens.tobytes(), num_computed_tokens=computed, bound=[run])
        state.MergeFrom(ring.state())
        return state


def without_cache(tokens: Any) -> Any:
    """Logits after each token, in blocks that nobody shares."""
    pools = [Blocks(len(tokens), 1).kv for _ in WEIGHTS]
    return forward(pools, [np.arange(len(tokens))] * len(pools), tokens, 0)


async def main() -> None:
    parser = own_engine.arguments("The same with a sliding window in one of two layers.")
    parser.add_argument("--num-window-blocks", type=int, default=64, help="of the layer with the window")
    args = parser.parse_args()
    hello = pb.RegisterRequest(model_name="toy of own_engine_windows.py", model_fingerprint=ROOT.model_fingerprint)
    hello.kv_cache_config.block_size = SIZE
    hello.kv_cache_config.groups.add(full_attention=common_pb2.FullAttentionSpec())
    window = common_pb2.SlidingWindowSpec(window_tokens=WINDOW, ring_blocks=RING)
    hello.kv_cache_config.groups.add(group=1, sliding_window=window)
    for group, num_blocks in enumerate((args.num_blocks, args.num_window_blocks)):
        hello.kv_cache_config.pools.add(group=group, tier=common_pb2.TIER_DEVICE, num_blocks=num_blocks)
    new_engine = functools.partial(Engine, num_blocks=args.num_blocks, num_window_blocks=args.num_window_blocks)
    own_engine.tell(await own_engine.generate_all(args.manager, hello, new_engine, args.max_tokens), without_cache)


if __name__ == "__main__":
    own_engine.run(main)
