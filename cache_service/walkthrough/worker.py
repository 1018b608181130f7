"""The worker of a walkthrough: it drives a real CacheManager, call after call, the way an honest worker does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from ..core.block_pool import BlockPool, State
from ..core.integrity import Audit
from ..core.manager import CacheManager
from ..core.messages import (
    TOKEN_BYTES,
    AllocateItem,
    AllocateOutcome,
    Appended,
    AppendItem,
    Grant,
    Granted,
    Group,
    Layout,
    Registration,
    Reply,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
    Uplink,
)
from ..core.refusal import Reason, Refusal
from ..core.session import Session

WORKER_ID: Final = "worker-0"
NUM_BLOCKS: Final = 17
"""16 blocks that can be granted, and the null block."""
BLOCK_SIZE: Final = 4

_ROOT: Final = Root("walkthrough")


class UnexpectedAnswer(Exception):
    """The core answered otherwise than the story needs."""


def listed(blocks: Iterable[int]) -> str:
    """Block ids as a sentence names them: 1, 2 and 3."""
    *most, last = map(str, blocks)
    return f"{', '.join(most)} and {last}" if most else last


class Words:
    """One token per word, numbered in the order in which they are first seen: a tokenizer for people."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> bytes:
        """The token ids of a text, as they travel."""
        return b"".join(self._id(word).to_bytes(TOKEN_BYTES, "little") for word in text.split())

    def decode(self, tokens: bytes | bytearray) -> tuple[str, ...]:
        """The words of token ids."""
        return tuple(
            self._words[int.from_bytes(tokens[begin : begin + TOKEN_BYTES], "little")]
            for begin in range(0, len(tokens), TOKEN_BYTES)
        )

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


class NewTable(NamedTuple):
    """What a sequence was granted."""

    blocks: tuple[int, ...]
    """From table index 0 on."""
    num_cached_tokens: int


class _Known:
    """What the worker knows of one of its sequences."""

    def __init__(self, tokens: bytes, num_blocks: int) -> None:
        self.tokens = tokens
        self.num_blocks = num_blocks
        self.num_generated = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_computed_tokens(self) -> int:
        # The KV of the last generated token is computed by the step after it.
        return self.num_tokens - min(self.num_generated, 1)


class Worker:
    """One worker with `NUM_BLOCKS` blocks of `BLOCK_SIZE` tokens. Each method is one call on the link."""

    def __init__(self) -> None:
        self.words = Words()
        self.manager = CacheManager(epoch=1)
        layout = Layout(BLOCK_SIZE, (Group(NUM_BLOCKS),))
        registration = Registration(WORKER_ID, 1, 1, "in-process", "walkthrough", _ROOT.model_fingerprint, layout)
        self._session_number = self.manager.register(registration, now=0.0).session
        self._call_no = 0
        self._applied = 0
        self._reserve: list[ReservedBlock] = []
        self._known: dict[str, _Known] = {}
        self._calls: list[str] = []

    @property
    def session(self) -> Session:
        """The manager's side of this worker."""
        return self.manager.worker(WORKER_ID)

    @property
    def pool(self) -> BlockPool:
        """The blocks of its one group."""
        return self.session.pools[0]

    def table(self, name: str) -> list[int]:
        """The block table of a live sequence."""
        return list(self.session.sequences[name, 1].tables[0])

    def blocks_in(self, state: State, among: Iterable[int] | None = None) -> list[int]:
        """The blocks in a state, of all or of those given, in that order."""
        pool = self.pool
        return [block for block in (among or range(1, pool.num_blocks)) if pool.state(block) is state]

    def check(self) -> Audit:
        """The core's own audit of all its laws."""
        return self.manager.check()

    def take_calls(self) -> tuple[str, ...]:
        """The calls made since the last time, with their answers, a line each."""
        calls, self._calls = tuple(self._calls), []
        return calls

    # -- the calls

    def allocate(self, name: str, prompt: str, *, reserve_wish: int | None = None) -> NewTable:
        """Allocate one sequence, which must be granted."""
        return self.allocate_all({name: prompt}, reserve_wish=reserve_wish)[0]

    def allocate_all(self, prompts: dict[str, str], *, reserve_wish: int | None = None) -> list[NewTable]:
        """Allocate several sequences in one call; all must be granted."""
        granted = []
        for name, outcome in zip(prompts, self._allocate(prompts, reserve_wish), strict=True):
            if not isinstance(outcome, Granted):
                raise UnexpectedAnswer(f"allocate({name!r}) was to be granted; the core answered {outcome!r}")
            table = NewTable(outcome.tables[0].blocks, outcome.num_cached_tokens)
            self._known[name] = _Known(self.words.encode(prompts[name]), len(table.blocks))
            granted.append(table)
        return granted

    def allocate_in_vain(self, name: str, prompt: str) -> Refusal:
        """Allocate one sequence for which there must be too few blocks."""
        (outcome,) = self._allocate({name: prompt}, None)
        if not isinstance(outcome, Refusal) or outcome.reason is not Reason.NO_BLOCKS:
            raise UnexpectedAnswer(f"allocate({name!r}) was to find too few blocks; the core answered {outcome!r}")
        return outcome

    def append(self, name: str, generated: str = "") -> Appended:
        """Report that everything known so far is computed, and `generated` words; new blocks come out of the reserve."""
        known = self._known[name]
        start = known.num_tokens
        new_tokens = self.words.encode(generated)
        known.tokens += new_tokens
        known.num_generated += len(new_tokens) // TOKEN_BYTES
        bound = []
        while known.num_blocks * BLOCK_SIZE < known.num_tokens:
            spare = self._reserve.pop(0)
            bound.append(TableEntry(known.num_blocks, spare.block, spare.generation))
            known.num_blocks += 1
        update = SequenceUpdate(_key(name), start, new_tokens, known.num_computed_tokens, (tuple(bound),))
        (outcome,), reply = self.manager.append(self._uplink(), [AppendItem(update)])
        if not isinstance(outcome, Appended):
            raise UnexpectedAnswer(f"append({name!r}) was to be accepted; the core answered {outcome!r}")
        stated = [f"num_computed_tokens={known.num_computed_tokens}"]
        if generated:
            stated.insert(0, f"{known.num_tokens - start} new tokens")
        stated += [f"block {block} as table[{index}]" for index, block, _ in bound]
        answer = f"{outcome.num_sealed_tokens} tokens sealed{self._apply(reply)}"
        self._calls.append(f'append("{name}", {", ".join(stated)}) → {answer}')
        return outcome

    def free(self, *names: str) -> None:
        """End sequences in one call, which also reports what they had computed."""
        updates = []
        for name in names:
            known = self._known.pop(name)
            updates.append(SequenceUpdate(_key(name), known.num_tokens, b"", known.num_computed_tokens))
        granted = self._apply(self.manager.free(self._uplink(), updates))
        for update in updates:
            self._calls.append(
                f'free("{update.key.sequence_id}", num_computed_tokens={update.num_computed_tokens}) → done{granted}'
            )

    # -- the link

    def _allocate(self, prompts: dict[str, str], reserve_wish: int | None) -> list[AllocateOutcome]:
        items = [AllocateItem(_key(name), _ROOT, self.words.encode(prompt)) for name, prompt in prompts.items()]
        outcomes, reply = self.manager.allocate(self._uplink(reserve_wish), items)
        granted = self._apply(reply)
        wish = "" if reserve_wish is None else f", reserve_wish={reserve_wish}"
        for item, outcome in zip(items, outcomes, strict=True):
            num_tokens = len(item.tokens) // TOKEN_BYTES
            call = f'allocate("{item.key.sequence_id}", {num_tokens} tokens{wish})'
            self._calls.append(f"{call} → {_answer(outcome)}{granted}")
        return outcomes

    def _uplink(self, reserve_wish: int | None = None) -> Uplink:
        self._call_no += 1
        wishes = () if reserve_wish is None else (reserve_wish,)
        return Uplink(self._session_number, self._call_no, self._applied, wishes)

    def _apply(self, reply: Reply) -> str:
        """Take new grants into the reserve; returns how to say so."""
        granted: list[int] = []
        for number, entry in reply.entries:
            if number > self._applied and isinstance(entry, Grant):
                self._reserve += [ReservedBlock(block, entry.generation) for block in entry.blocks]
                granted += entry.blocks
            self._applied = max(self._applied, number)
        return f"; the reserve gets {granted}" if granted else ""


def _key(name: str) -> SequenceKey:
    return SequenceKey(name, 1, 0)


def _answer(outcome: AllocateOutcome) -> str:
    if isinstance(outcome, Granted):
        return f"table {list(outcome.tables[0].blocks)}, {outcome.num_cached_tokens} tokens cached"
    if isinstance(outcome, Refusal):
        return f"{outcome.reason.value}: {outcome.message}"
    return f"wait for {outcome.leader.sequence_id!r} up to position {outcome.position}"
