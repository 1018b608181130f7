"""Input and output of the core: plain immutable data, in the words of docs/ARCHITECTURE.md.

Token ids are little-endian uint32 in `bytes`; times are seconds of a monotonic clock; counts are blocks or tokens as the
name says. Named tuples, because a busy manager makes some ten thousand of them a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from .refusal import Refusal
from .session_key import NO_KEY, SessionKey

TOKEN_BYTES = 4
"""Bytes of one token id on the manager plane."""

DIGEST_BYTES = 32
"""SHA-256."""


class Limits(NamedTuple):
    """Bounds on everything that a peer can make the manager keep or walk through."""

    max_workers: int = 1024
    max_sequences_per_session: int = 4096
    max_tokens_per_sequence: int = 1 << 20
    max_items_per_call: int = 1024
    max_blocks_per_pool: int = 1 << 24
    max_groups: int = 16
    """Groups that one worker may have."""
    max_boundaries: int = 8
    """Boundaries of one sequence that are still to come."""
    max_asked_boundaries: int = 8
    """That one request asks for."""
    max_block_size: int = 1 << 16
    max_id_bytes: int = 128
    max_name_bytes: int = 256
    max_process_key_bytes: int = 64
    max_digest_bytes: int = 32
    max_known_incarnations: int = 4096
    max_downlink_entries: int = 8192
    """Not counting the session's one Drain."""
    max_total_blocks: int = 1 << 26
    """Blocks that the pools of all live sessions may grow to, together."""
    max_total_tokens: int = 1 << 30
    """Token slots of these blocks, and again tokens of all live sequences."""
    max_blocks_per_sequence: int = 1 << 16
    """Blocks in one table: this bounds a grant, a Free, and the answer to a repeated Allocate."""
    max_reserve_blocks: int = 1 << 18
    """Blocks in the reserve of one session. A larger wish counts as this one."""
    max_blocks_per_grant: int = 1 << 12
    """To the reserve, in one call or heartbeat; the rest follows with the next."""
    max_blocks_per_reply: int = 1 << 16
    """Blocks in one reply's downlink grants, and as many again in its tables. The rest follows in a later reply."""
    max_grace_seconds: float = 3600.0
    max_numbers_skipped: int = 1 << 20
    """How far a number that a worker counts may be above the last one known: one message must not use up all numbers."""
    max_contents_per_report_part: int = 4096
    """Bounds the time for which a part delays other calls."""
    max_blocks_per_report_part: int = 1 << 18
    """Blocks in tables, scratch, the reserve and units, and idle ones, in one part."""
    max_growth_per_report_part: int = 1 << 19
    """Blocks by which the pool grows before the part must be sent again."""
    max_reports_at_once: int = 4
    """Workers whose reports are applied at the same time; the others are asked to wait."""


class Root(NamedTuple):
    """What makes KV exchangeable, apart from the tokens and the block size."""

    model_fingerprint: str
    adapter: str = ""
    tenant_salt: str = ""
    input_digest: bytes = b""


class SequenceKey(NamedTuple):
    """One try at one request."""

    sequence_id: str
    attempt: int
    round: int


class TableEntry(NamedTuple):
    """One entry of a block table as a worker names it."""

    table_index: int
    block: int
    generation: int


Tables = tuple[tuple[TableEntry, ...], ...]
"""Entries by group; groups at the end may be left out."""


class ReservedBlock(NamedTuple):
    """A block of the reserve as a worker names it."""

    block: int
    generation: int


Blocks = tuple[tuple[ReservedBlock, ...], ...]
"""Sets of blocks by group; groups at the end may be left out."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """How a worker introduces layers whose KV is in the same blocks, because they see as much of a sequence. Each kind of group has
    a subclass, in `groups`."""

    num_blocks: int
    """With the null block 0."""
    bytes_per_block: int = 0
    """Bytes of one block over all layers of the group. For displays only."""

    def check(self, field: str, specs: tuple[GroupSpec, ...], block_size: int, limits: Limits) -> None:
        """Raise Refusal (BAD_FIELD) if a group like this, one of a worker's `specs`, cannot be served. `field`: its name in the
        message."""


class Layout(NamedTuple):
    """The KV cache of a worker: each group has a pool of its own."""

    block_size: int
    groups: tuple[GroupSpec, ...]
    """One or more groups, numbered from 0."""


class WorkerLoad(NamedTuple):
    """A worker's load, as it reports it."""

    num_running: int = 0
    num_waiting: int = 0
    num_uncomputed_tokens: int = 0


class Registration(NamedTuple):
    """A worker's introduction."""

    worker_id: str
    incarnation: int
    register_no: int
    address: str
    """host:port where it serves text; empty: it serves none."""
    model_name: str
    model_fingerprint: str
    layout: Layout
    max_model_len: int = 0
    engine: str = ""
    holds_state: bool = False
    process_key: bytes = b""
    """Random, of this process; never shown. Empty: it has none, and no later process can prove that it replaces it."""
    predecessor_key: bytes = b""
    """The process_key of the process that this one replaces, which has ended."""
    facts_digest: bytes = b""
    """Names what the worker answers of its model; empty: it states none."""


class Registered(NamedTuple):
    """The answer to it."""

    epoch: int
    session: int


class Uplink(NamedTuple):
    """Begins every mutating call: session, number of the call, downlink entries applied, wishes for the reserve."""

    session: int
    call_no: int
    downlink_ack: int = 0
    reserve_wishes: tuple[int | None, ...] = ()
    """Blocks that the reserve of each group shall have. None, or a group left out at the end: the last wish stands."""
    returned: tuple[tuple[ReservedBlock, ...], ...] = ()
    """Reserve blocks given back, by group. Groups at the end may be left out."""
    key: SessionKey = NO_KEY


class Grant(NamedTuple):
    """Downlink entry: blocks for the reserve, all with one generation."""

    blocks: tuple[int, ...]
    generation: int
    group: int = 0


class Stop(NamedTuple):
    """Downlink entry: a larger attempt of the sequence lives on another session."""

    key: SequenceKey


class Boundary(NamedTuple):
    """Downlink entry: another prompt parts from this sequence's there; name the windows that end at it, if it is still to come."""

    key: SequenceKey
    num_tokens: int
    """Tokens of the sequence before it: a multiple of the block size."""


class Drain(NamedTuple):
    """Downlink entry: take no new requests, end the running ones within the grace, and deregister."""

    grace_seconds: float | None
    """None: as long as the worker's own settings say."""


Entry = Grant | Stop | Boundary | Drain


class DownlinkEntry(NamedTuple):
    """One numbered entry of the list that every reply carries until the worker acknowledges it."""

    number: int
    entry: Entry


class ReportedBlocks(NamedTuple):
    """The blocks of a group that hold a chain of contents."""

    group: int
    blocks: tuple[int, ...]
    """One for each content, 0 for none."""
    generations: tuple[int, ...]


class ContentRun(NamedTuple):
    """A chain of contents that a worker reports; see ReportPart."""

    parent: int
    """Number of the content that the first is a child of; 0: `root`."""
    root: Root | None
    tokens: bytes
    num_contents: int
    """Length of the chain."""
    blocks: tuple[ReportedBlocks, ...]
    """The blocks that hold the chain, at most one entry for each group."""


class ReportedSequence(NamedTuple):
    """A sequence that lives at a worker."""

    key: SequenceKey
    root: Root
    tokens: bytes
    num_computed_tokens: int
    num_cached_tokens: int
    tables: Tables
    """The table of each group from index 0 on, without gaps; in a group with a window only the named entries."""
    scratch: Blocks = ()
    boundaries: tuple[int, ...] = ()
    """Those to come, in tokens."""
    encoder_computed: bool = False


class ReportedUnit(NamedTuple):
    """The KV of an encoder's input that a worker holds."""

    root: Root
    group: int
    blocks: tuple[ReservedBlock, ...]
    """All of them, in order."""


class ReportPart(NamedTuple):
    """One part of a worker's report. Contents are numbered from 1 over all parts, parents before children."""

    part: int
    last: bool
    contents: tuple[ContentRun, ...] = ()
    sequences: tuple[ReportedSequence, ...] = ()
    reserve: tuple[tuple[ReservedBlock, ...], ...] = ()
    """Reserve blocks by group. Groups at the end may be left out."""
    idle_blocks: tuple[tuple[int, ...], ...] = ()
    """Complete blocks in no table by group, least recently used first. They may come before or after their contents. Groups at
    the end may be left out."""
    units: tuple[ReportedUnit, ...] = ()
    live: bool = False
    """All sequences and the reserve have come; what follows are contents. `last` implies it."""


class BlockCounts(NamedTuple):
    """How many blocks of a pool are in which state; free + cached + held + reserved + copying + withheld = capacity."""

    capacity: int
    free: int
    cached: int
    held: int
    reserved: int
    copying: int
    shared: int
    withheld: int = 0
    """Never granted, and beyond what the budget of all workers leaves room for."""


class Reply(NamedTuple):
    """What ends every answer on the link."""

    entries: tuple[DownlinkEntry, ...]
    counts: tuple[BlockCounts, ...]
    """The counts of each group's pool, by group."""
    heartbeat_no: int = 0
    """Number of the answer to a heartbeat; 0 in answers to other calls."""


class AllocateItem(NamedTuple):
    """A sequence that wants a block table."""

    key: SequenceKey
    root: Root
    tokens: bytes
    max_new_tokens: int = 1
    no_wait: bool = False
    max_cached_tokens: int | None = None
    boundaries: tuple[int, ...] = ()
    """Tokens after which windows and states shall be kept for others, as the end of a system prompt; rounded down to whole blocks,
    or to the grid of states."""
    retention_interval: int = 0
    """Tokens; they shall also be kept after every multiple of it. 0: no more."""
    num_encoder_tokens: int = 0
    """Tokens of the encoder's input that the root names by its digest, if the worker has a group with cross attention."""


class GrantedTable(NamedTuple):
    """The block table of one group; of a group with a window its named part, which holds hits."""

    blocks: tuple[int, ...]
    """0 where there is a hole, which only a table with a window has."""
    generations: tuple[int, ...]
    start: int = 0
    """Table index of the first; 0 without a window."""
    scratch: tuple[ReservedBlock, ...] = ()
    """With a window or a state: blocks without a place."""


class Granted(NamedTuple):
    """A sequence's block tables by group, and the prefix that their first blocks already hold."""

    tables: tuple[GrantedTable, ...]
    num_cached_tokens: int
    boundaries: tuple[int, ...] = ()
    """Boundaries in tokens, ascending: when the worker has computed up to one, it is to name its window there."""
    encoder_cached: bool = False
    """The table of the group with cross attention holds the KV of the encoder's input."""


class Wait(NamedTuple):
    """Nothing granted: `leader` is computing a prefix of this prompt, useful up to `position` tokens; 0: the KV of its encoder's
    input."""

    leader: SequenceKey
    position: int


AllocateOutcome = Granted | Wait | Refusal


class SequenceUpdate(NamedTuple):
    """What a worker knows of one of its sequences. A statement of state, not a delta."""

    key: SequenceKey
    start: int = 0
    tokens: bytes = b""
    num_computed_tokens: int = 0
    bound: Tables = ()
    scratch: Blocks = ()
    """Blocks of the reserve that the sequence uses without a place, in groups with a window."""
    released: Tables = ()
    """What the sequence no longer uses in groups with a window: entries, and scratch blocks, whose index means nothing."""
    encoder_computed: bool = False
    """The KV of the encoder's input is complete, in all blocks of its table."""


class AppendItem(NamedTuple):
    """An update of a live sequence; `want_blocks` is the length of tables that an engine without a reserve asks for."""

    update: SequenceUpdate
    want_blocks: int = 0


class ForkItem(NamedTuple):
    """A fork that a worker has made: `update` is of the fork, whose first `num_shared_blocks` blocks are its parent's."""

    parent: SequenceKey
    num_shared_blocks: int
    update: SequenceUpdate


class Appended(NamedTuple):
    """The update is taken in; `new_entries` continue the tables where the engine's knowledge of them ends."""

    num_sealed_tokens: int
    new_entries: Tables = ()


AppendOutcome = Appended | Refusal


class BlockMissCause(Enum):
    """Why a block of a prompt is not served from the cache."""

    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    OTHER_ROOT = "other root"
    BEING_COMPUTED = "being computed"
    PARTIAL_TAIL = "partial tail"
    LAST_TOKEN = "last token"
    ON_ANOTHER_WORKER = "on another worker"
    WINDOW_NOT_KEPT = "window not kept"
    SNAPSHOT_NOT_KEPT = "snapshot not kept"
