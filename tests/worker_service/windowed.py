"""A worker's cache side with windows, states and units, and the core: steps that compute no KV, calls that are answered at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Boundary, Limits, SequenceKey
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache.engine_cache import Computed, EngineCache
from kvpool.worker_service.cache.groups.state import RunningState
from kvpool.worker_service.cache.groups.window import Ring
from kvpool.worker_service.cache.ledger import BlockLedger, Content
from kvpool.worker_service.cache.link_state import MutatingCall
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.settings import CacheSettings
from tests import manager_calls
from tests.cache_groups import groups_of

ROOT = common_pb2.Root(model_fingerprint="m")


class Worker:
    """One worker. `num_blocks`, `windows`: by group. `grid`: tokens; the last group has a state. `cross_group`: the one that has
    the KV of encoder inputs."""

    def __init__(
        self,
        num_blocks: tuple[int, ...],
        windows: tuple[int, ...],
        *,
        block_size: int = 16,
        chunk: int = 512,
        grid: int = 0,
        retention_interval: int = 0,
        reserve_seconds: float = 2.0,
        limits: Limits | None = None,
        cross_group: int | None = None,
    ) -> None:
        settings = CacheSettings(
            block_size=block_size,
            groups=groups_of(num_blocks, windows, grid=grid, unit=cross_group),
            max_chunk_tokens=chunk,
            retention_interval=retention_interval,
            reserve_seconds=reserve_seconds,
        )
        self.block_size = block_size
        self.cache = EngineCache(settings)
        self.manager = CacheManager(1, limits=limits)
        self.methods: list[str] = []
        """Of all calls that the manager has executed."""
        self.now = 0.0
        self._register_no = 0
        self._waiting: list[CacheSequence] = []
        self.register()

    def register(self) -> None:
        """Begin a session, and report what the worker holds."""
        self.begin_report()
        self.call()

    def lose_session(self) -> None:
        """The session is over, and another one begins with a report."""
        self.cache.state.lose_session("the test says so")
        self.register()

    def begin_report(self) -> None:
        """Begin a session; what the worker holds is to be reported."""
        self._register_no += 1
        request = cache_pb2.RegisterRequest(
            worker_id="w",
            incarnation=1,
            register_no=self._register_no,
            model_fingerprint="m",
            kv_cache_config=self.cache.settings.kv_cache_config(),
            holds_state=self.cache.state.holds_anything,
        )
        response: Any = manager_calls.execute(self.manager, "Register", request, self.now)
        self.cache.on_registered(response)

    # -- calls

    def call(self, *waiting: CacheSequence) -> None:
        """All calls that are due, for these waiting sequences among others."""
        self.now += 1.0
        self.call_now(*waiting)

    def call_now(self, *waiting: CacheSequence) -> None:
        """Those that need no time to pass."""
        while (call := self.cache.next_call(lambda: waiting, self.now)) is not None:
            self.answer(call)

    def next_call(self, *waiting: CacheSequence) -> MutatingCall:
        """The next one, which must be due."""
        call = self.cache.next_call(lambda: waiting, self.now)
        assert call is not None
        return call

    def answer(self, call: MutatingCall) -> None:
        """Let it be executed and answered."""
        self.cache.on_reply(call, self.execute(call.request), self.now)

    def heartbeat(self) -> None:
        """One heartbeat and its answer."""
        request = self.cache.keep_alive(common_pb2.WorkerLoad())
        assert request is not None
        self.cache.on_keep_alive(self.manager.sessions[-1].number, self.execute(request))

    def tell(self, sequence_id: str, num_tokens: int, round_: int = 0) -> None:
        """A heartbeat brings a boundary of a sequence."""
        self.manager.sessions[-1].downlink.push(Boundary(SequenceKey(sequence_id, 1, round_), num_tokens))
        self.heartbeat()

    def execute(self, request: Any) -> Any:
        """The manager's answer."""
        method = type(request).__name__.removesuffix("Request")
        self.methods.append(method)
        return manager_calls.execute(self.manager, method, request, self.now)

    # -- sequences

    def sequence(
        self,
        name: str,
        prompt: Sequence[int],
        num_new: int = 1,
        kept: tuple[int, ...] = (),
        *,
        root: common_pb2.Root = ROOT,
        **more: Any,
    ) -> CacheSequence:
        """One that waits."""
        return CacheSequence(name, 1, root, list(prompt), max_new_tokens=num_new, kept=kept, **more)

    def begin(self, name: str, prompt: Sequence[int], num_new: int = 1, **more: Any) -> CacheSequence:
        """One that has its table; `more` as in `sequence`."""
        sequence = self.sequence(name, prompt, num_new, **more)
        self.call(sequence)
        assert sequence.state is SequenceState.LIVE, sequence
        return sequence

    def step(self, sequence: CacheSequence, token: int = 1) -> None:
        """Compute its next chunk, or its last token; then it has `token` more, if that was all."""
        self.launch(sequence)
        self.finish(sequence, token)

    def launch(self, sequence: CacheSequence) -> None:
        """Begin a step."""
        assert self.cache.extend(sequence, self._end(sequence))
        self.cache.begin_step([sequence])

    def finish(self, sequence: CacheSequence, token: int = 1) -> None:
        """End it, and make the calls that are due then."""
        self._end_step(sequence, token)
        self.call()

    def compute(self, sequence: CacheSequence, num_computed_tokens: int, token: int = 7) -> None:
        """Steps up to there, without any call."""
        while sequence.num_computed_tokens < num_computed_tokens:
            self.launch(sequence)
            self._end_step(sequence, token)

    def _end_step(self, sequence: CacheSequence, token: int) -> None:
        end = self._end(sequence)
        self.cache.end_step([Computed(sequence, end, token if end == len(sequence.tokens) else None)], self.now)

    def _end(self, sequence: CacheSequence) -> int:
        return sequence.num_computed_tokens + self.cache.chunk(sequence, self.cache.settings.max_chunk_tokens)

    def generate(self, name: str, prompt: Sequence[int], answer: Sequence[int]) -> CacheSequence:
        """All of a sequence but its end."""
        sequence = self.begin(name, prompt, len(answer))
        for token in answer:
            while sequence.num_computed_tokens < len(sequence.tokens) - 1:
                self.step(sequence, token)
            if len(sequence.tokens) < len(prompt) + len(answer):
                self.step(sequence, token)
        return sequence

    def end(self, sequence: CacheSequence) -> None:
        """Free it."""
        self.cache.free(sequence)
        self.call()

    def held(self) -> tuple[int, ...]:
        """Blocks held by sequences or reserved, by group, as the manager counts them."""
        return tuple(counts.held + counts.reserved for counts in self.manager.sessions[0].counts())

    def check(self) -> None:
        """Every law of the manager holds."""
        assert self.manager.check().violations == []


def fill(ledger: BlockLedger, first_block: int, *pieces: bytes, root: common_pb2.Root = ROOT) -> list[Content]:
    """The contents of complete and idle blocks from this one on, each computed after the one before; all have generation 1."""
    chain: list[Content] = []
    for block, tokens in enumerate(pieces, first_block):
        ledger.accept_grant(block, 1)
        ledger.use(block)
        ledger.complete(block, Content(chain[-1] if chain else None, root, tokens))
        ledger.drop(block)
        content = ledger.content(block)
        assert content is not None
        chain.append(content)
    return chain


def ring_of(sequence: CacheSequence, group: int = 1) -> Ring:
    """What it has in a group with a window."""
    ring = sequence.group_tables[group]
    assert isinstance(ring, Ring)
    return ring


def state_of(sequence: CacheSequence) -> RunningState:
    """What it has in the group of the state."""
    state = sequence.group_tables[-1]
    assert isinstance(state, RunningState)
    return state
