"""What a kind of group has to say: of its pool, and of the blocks of one sequence in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from kvpool.v1 import cache_pb2, common_pb2

from ..entry import Entry, StateBlocks
from ..ledger import BlockLedger, Content, DisagreementError
from ..reserve import SpareBlock


class Sizes(NamedTuple):
    """What the groups of a worker have in common."""

    block_size: int
    """Token slots of one block."""
    grid_blocks: int
    """Boundaries are multiples of so many blocks."""
    max_chunk_tokens: int
    """Most tokens of one sequence in one step."""


class Text(Protocol):
    """What a group sees of a sequence that is granted blocks."""

    @property
    def root(self) -> common_pb2.Root: ...
    @property
    def num_encoder_tokens(self) -> int: ...
    def num_blocks(self, block_size: int) -> int: ...
    def most_blocks(self, block_size: int) -> int: ...


class Statement(NamedTuple):
    """What a call states of a sequence in one group. Everything is stated again until a call is executed."""

    bound: tuple[Entry, ...] = ()
    scratch: tuple[SpareBlock, ...] = ()
    released: tuple[Entry, ...] = ()
    encoder_computed: bool = False
    """The KV of the encoder's input is complete."""


class Run(NamedTuple):
    """Blocks for consecutive entries of a table, or in no order that matters, with their generations."""

    blocks: List[int] = ()
    generations: List[int] = ()
    start: int = 0
    """Table index of the first."""

    def entries(self) -> list[Entry]:
        return list(map(Entry, range(self.start, self.start + len(self.blocks)), self.blocks, self.generations))

    def spare(self) -> list[SpareBlock]:
        """The blocks without their places."""
        return list(map(SpareBlock, self.blocks, self.generations))


class GroupGrant(NamedTuple):
    """What a sequence was granted in one group."""

    hits: Run = Run()
    """Blocks that hold what the sequence needs."""
    empty: Run = Run()
    """Blocks for it to fill."""


class GroupTable(ABC):
    """The blocks of one sequence in one group. All counts are blocks; boundaries are counted in blocks of tokens too."""

    grows: ClassVar[bool] = False
    """Whether it has a block for each block of tokens, so that decoding takes blocks of the reserve."""
    keeps_boundaries: ClassVar[bool] = False
    """Whether it is a `Scratch`: what it had at an earlier place of the text is there only if it was named at a boundary."""
    is_attended: ClassVar[bool] = False
    """Whether layers attend to the sequence itself through the block ids."""

    def __init__(self) -> None:
        self.table: list[int] = []
        """Block ids from position 0, 0 where nothing is kept. The list stays the same object."""

    # -- steps

    def num_missing(self, num_computed_tokens: int, num_slots: int) -> int:
        """Blocks of the reserve without which there can be no step that computes up to `num_slots` tokens."""
        return 0

    def num_useful(self, num_computed_tokens: int, num_slots: int) -> int:
        """Blocks of the reserve that the step can use in addition, so that others can go on from there."""
        return 0

    @abstractmethod
    def advance(self, num_computed_tokens: int, num_slots: int, spare: Iterable[SpareBlock] = ()) -> None:
        """Prepare the blocks for a step that computes up to `num_slots` tokens. No step may use the sequence. `spare`: blocks of
        the reserve, as many as `num_missing` says and, if there are more, `num_useful`."""

    def block_of(self, index: int) -> int:
        """The block that holds block `index` of the tokens as soon as that is computed; 0: none, or one that gets a name at a
        boundary."""
        return 0

    def state_use(self, num_computed_tokens: int, num_slots: int) -> StateBlocks | None:
        """The blocks of the step that `advance` has prepared, if the layers are recurrent."""
        return None

    # -- an encoder's input

    is_encoder: ClassVar[bool] = False
    """Whether it holds the KV of an encoder's input."""
    was_encoded = False
    """Whether that KV was served from the cache."""

    @property
    def num_tokens_to_encode(self) -> int:
        """Tokens of the encoder's input, if the encoder is to run with the next tokens of the sequence."""
        return 0

    def encode(self, root: common_pb2.Root, num_groups: int) -> None:
        """Note that the step that has computed the first tokens of the sequence has run the encoder before them. Only if there are
        tokens to encode."""
        raise NotImplementedError

    # -- forks

    @abstractmethod
    def num_for_fork(self, num_computed_tokens: int, num_to_come: int) -> int:
        """Blocks of the reserve that `fork` needs."""

    @abstractmethod
    def fork(self, num_computed_tokens: int, spare: List[SpareBlock]) -> Forked:
        """What a fork of the sequence has, which no step may use, where so many tokens are computed. `spare`: as many blocks of the
        reserve as `num_for_fork` says."""

    # -- what the manager knows

    @property
    def has_news(self) -> bool:
        """Whether a call has something to state that the progress of the sequence does not show."""
        return False

    @property
    @abstractmethod
    def from_reserve(self) -> list[SpareBlock]:
        """Blocks that the manager may still count as reserved. In a fork that it does not know they are all that is not shared."""

    @property
    @abstractmethod
    def num_unstated(self) -> int:
        """Number of blocks in `from_reserve`."""

    @property
    def num_entries_of_news(self) -> int:
        """Entries of the next statement."""
        return self.num_unstated

    def has_to_release(self, copied: Container[int]) -> bool:
        """Whether the next call can release blocks, with the same argument as `state`."""
        return False

    @abstractmethod
    def state(self, copied: Container[int] = ()) -> tuple[Statement, list[int]]:
        """What the next call states, and the blocks that this worker stops using with it. `copied`: blocks that a step has yet to
        copy for a fork, which are not released before."""

    @abstractmethod
    def acknowledge(self, stated: Statement) -> None:
        """Note that a call that stated this was executed."""

    @abstractmethod
    def acknowledge_all(self) -> list[int]:
        """Count everything as acknowledged, since a report states the present; returns the blocks that this worker stops using with
        it."""

    @abstractmethod
    def blocks(self) -> Iterable[int]:
        """All blocks that this worker uses for the sequence, in the order in which its pool may evict them."""

    @abstractmethod
    def entries(self) -> list[Entry]:
        """Entries in ascending order, scratch blocks left out."""

    def scratch(self) -> list[SpareBlock]:
        """The blocks of which the manager knows the ids, and not the content."""
        return []


class Forked(NamedTuple):
    """What a fork has in one group."""

    table: GroupTable
    shared: List[int]
    """Blocks that it has in common with its parent."""
    copies: List[tuple[int, int]]
    """(source, target) of each copy to make: a block of the parent, and the block of the fork that gets its content."""


class PlainTable(GroupTable):
    """A table of blocks with their generations, in order."""

    def __init__(self, blocks: Iterable[int], generations: Iterable[int]) -> None:
        self.table = list(blocks)
        self.generations = list(generations)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.table}>"

    def blocks(self) -> Iterable[int]:
        return reversed(self.table)

    def entries(self) -> list[Entry]:
        return self.entries_from(0)

    def entries_from(self, first: int) -> list[Entry]:
        """Entries from an index on."""
        return list(map(Entry, range(first, len(self.table)), self.table[first:], self.generations[first:]))


@dataclass(frozen=True)
class Group(ABC):
    """A group of layers, and the pool of its blocks."""

    num_blocks: int
    """Blocks of the pool, the null block included."""

    table_type: ClassVar[type[GroupTable]]
    ledger_type: ClassVar[type[BlockLedger]] = BlockLedger
    bounds_chunks: ClassVar[bool] = False
    """Whether its tables are made for steps of `max_chunk_tokens` and no more."""

    @property
    def grid_tokens(self) -> int:
        """Boundaries of all groups must be multiples of so many tokens; 0: this one has no such need."""
        return 0

    # -- what is needed

    @abstractmethod
    def introduce(self, spec: common_pb2.KVCacheGroup, sizes: Sizes) -> None:
        """Say to the manager what kind of group it is."""

    @abstractmethod
    def num_for(self, text: Text, sizes: Sizes) -> int:
        """Blocks that a sequence is granted at most."""

    @abstractmethod
    def fork_blocks(self, sizes: Sizes) -> int:
        """Blocks of the reserve that a fork needs at most."""

    def most_blocks(self, sizes: Sizes) -> int | None:
        """Blocks of tokens that one sequence can have at most; None: this group does not bound it."""
        return None

    def most_encoder_blocks(self) -> int:
        """Blocks of the longest input of an encoder that it can hold."""
        return 0

    @abstractmethod
    def num_spare(self, sizes: Sizes, spare: int, num_forks: int, num_lacking: int) -> int:
        """Blocks that the reserve should hold. `spare`: what decoding needs of a group that grows. `num_forks`: forks to come.
        `num_lacking`: blocks without which boundaries cannot be named."""

    def num_for_forks(self, sizes: Sizes, num_forks: int) -> int:
        """Blocks that so many forks need, as far as there are as many."""
        return min(num_forks * self.fork_blocks(sizes), self.num_blocks - 1)

    def num_for_beams(self, sizes: Sizes, num_beams: int) -> int:
        """Blocks that a beam search must have in the pool whatever its length; 0: what beams share depends on the text."""
        return 0

    # -- grants

    @abstractmethod
    def read(self, granted: cache_pb2.Granted, group: int, text: Text, sizes: Sizes) -> GroupGrant:
        """What was granted in this group, whose number is `group`, after a check that it is what the sequence needs. The runs have
        as many generations as blocks. Raises DisagreementError."""

    @abstractmethod
    def accept(self, ledger: BlockLedger, hits: Run, last: Content | None, tokens: bytes, text: Text) -> Content | None:
        """Accept hits, which hold `tokens`; `last`: what another group has at their end, or None if no other group was asked.
        Returns the content at the end. Raises DisagreementError."""

    @abstractmethod
    def take(self, ledger: BlockLedger, granted: GroupGrant, text: Text, sizes: Sizes) -> GroupTable:
        """The table of a sequence out of what was granted and accepted, and is in use now."""


def disagree_about(num_blocks: int, group: int, text: Text, why: str) -> DisagreementError:
    """The error that what was granted in a group is not what the sequence needs."""
    return DisagreementError(f"{text!r} was granted {num_blocks} blocks of group {group} {why}")
