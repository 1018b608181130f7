"""Two workers, one manager, a client, and the messages between them: everything that can happen next, and what then is.

A world is a state. `events` names what can happen in it, `apply` lets one of them happen. All is deterministic: no clock, no
randomness. Time-outs are events; so is the end of a lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import ge
from typing import NamedTuple

from google.protobuf.message import Message

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.sequence import Sequence
from kvpool.v1 import cache_pb2
from kvpool.worker_service.cache.link_state import MAX_STALE_CALLS, MutatingCall
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.cache.settings import CacheSettings
from tests.cache_groups import groups_of
from tests.exhaustive.engine import FINGERPRINT, BrokenLaw, TinyEngine
from tests.exhaustive.parts import Form, Part, for_reading, freeze_object
from tests.exhaustive.wire import Letter, execute, request_of, response_of

BLOCK_SIZE = 2
ASKING_AT = 1.0
"""The time at which workers ask what to say. All else happens at 0, so every pause between two tries is over."""


class Wanted(NamedTuple):
    """A request of the client."""

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    worker: int
    salt: str = ""


class Budget(NamedTuple):
    """How often what is not bound to happen may still happen in a run."""

    faults: int = 0
    """Messages lost, doubled, or later than the caller waits."""
    restarts: int = 0
    """The manager starts anew, a worker does, or a lease runs out."""
    moves: int = 0
    """The client goes to the other worker with attempt + 1, though nothing has failed."""
    cancels: int = 0
    forks: int = 0

    def covers(self, other: Budget) -> bool:
        """Whether all that may happen with `other` may happen with this one."""
        return all(map(ge, self, other))


@dataclass(frozen=True)
class Start:
    """Requests, a budget, and what the two workers are like."""

    wanted: tuple[Wanted, ...]
    budget: Budget
    at_once: bool = False
    """A call and its answer are one event, unless a fault is spent on it; else each message is one, and arrives when it likes."""
    num_blocks: tuple[int, ...] = (3,)
    """Of each group's pool, with the null block."""
    windows: tuple[int, ...] = ()
    """By group: tokens that its layers see; 0: all. Empty: all groups see all."""
    grid: int = 0
    """Tokens: the last group has a state, kept at multiples of it; 0: it has none."""

    def begin(self) -> World:
        """The world in which both workers have just registered."""
        world = World(self)
        for index in range(2):
            world.apply(Event("register", index))
            while world.wire:
                world.apply(Event("deliver", 0))
        return world


class Event(NamedTuple):
    """Something that can happen: `what`, to the worker, letter or request with that index."""

    what: str
    at: int = 0
    how: str = ""
    """Where calls take place at once: what goes wrong with this one."""


SPEAKING = frozenset({"register", "say"})
"""Events in which a worker makes a call."""
MISHAPS = ("slow", "lost", "unheard", "doubled", "given up")
"""What can go wrong with a call that otherwise takes place at once: it is under way while other things happen; the request is lost;
the answer is; a second copy of the request is left under way; the caller waits no longer for a request that is under way."""


LATE = frozenset({"STALE_CALL", "STALE_SESSION", "STALE_REGISTER", "STALE_INCARNATION", "WORKER_ELSEWHERE"})
"""Why a message of an honest worker may be refused."""


MUTATING = "mutating"
"""All calls but Register: one at a time."""


def kind_of(method: str) -> str:
    return method if method == "Register" else MUTATING


class Peer:
    """A worker: its process, and what its edge knows."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.engine = TinyEngine(settings)
        self.incarnation = 1
        self.register_no = 0
        self.num_calls = 0
        """Calls of all kinds, over all lives."""
        self.waits = dict.fromkeys(("Register", MUTATING), 0)
        """The call of each kind that is waited for; 0: none."""


@dataclass
class Asked:
    """Where the client is with one of its requests."""

    attempt: int = 0
    worker: int = 0
    delivered: tuple[int, ...] = ()
    is_over: bool = False
    """All its tokens are delivered, or the client has gone away."""

    def state(self) -> tuple[int, int, tuple[int, ...], bool]:
        return self.attempt, self.worker, self.delivered, self.is_over


class State(NamedTuple):
    """A world that is frozen: `World.freeze`, `World.thaw`."""

    wanted: tuple[Wanted, ...]
    at_once: bool
    left: Budget
    wire: tuple[Letter, ...]
    asked: tuple[tuple[int, int, tuple[int, ...], bool], ...]
    parts: tuple[Part, ...]


class World:
    """A state.

    Copies share the manager and the workers with each other until they change them: whatever is changed passes
    `_manager_to_change` or `_peer_to_change`.
    """

    def __init__(self, start: Start) -> None:
        assert start.budget.faults < MAX_STALE_CALLS, (
            "each fault can make one call stale: their number belongs into the fingerprint"
        )
        self.at_once = start.at_once
        settings = CacheSettings(
            block_size=BLOCK_SIZE,
            groups=groups_of(start.num_blocks, start.windows, grid=start.grid),
            max_chunk_tokens=BLOCK_SIZE,
            report_seconds=0.0,
            no_blocks_retry_seconds=0.0,
        )
        self.wanted = start.wanted
        self.left = start.budget
        self.manager = CacheManager(1)
        self.peers = [Peer(settings) for _ in range(2)]
        self.wire: list[Letter] = []
        self.asked = [Asked() for _ in start.wanted]
        self.parts: list[Part | None] = [None, None, None]
        """The manager, and each worker, as long as it is what it was frozen as."""
        self.has_called = False
        """The last event has made a worker call the manager."""

    # -- copies

    @staticmethod
    def thaw(state: State) -> World:
        world = World.__new__(World)
        world.wanted, world.at_once, world.left = state.wanted, state.at_once, state.left
        world.manager, *world.peers = map(for_reading, state.parts)
        world.wire = list(state.wire)
        world.asked = [Asked(*asked) for asked in state.asked]
        world.parts = list(state.parts)
        world.has_called = False
        return world

    def freeze(self, forms: list[Form]) -> State:
        """What copies are made from; `forms` are those of its parts."""
        parts = [
            Part(freeze_object(whole), form) if part is None else part
            for part, whole, form in zip(self.parts, (self.manager, *self.peers), forms, strict=True)
        ]
        asked = tuple([asked.state() for asked in self.asked])
        return State(self.wanted, self.at_once, self.left, tuple(self.wire), asked, tuple(parts))

    def _manager_to_change(self) -> CacheManager:
        part, self.parts[0] = self.parts[0], None
        if part is not None:
            self.manager = part.copy()
        return self.manager

    def _peer_to_change(self, index: int) -> Peer:
        part, self.parts[1 + index] = self.parts[1 + index], None
        if part is not None:
            self.peers[index] = part.copy()
        return self.peers[index]

    # -- what can happen

    def events(self) -> list[Event]:
        """All that can happen next. Some of it may turn out to change nothing."""
        found: list[Event] = []
        for index, peer in enumerate(self.peers):
            found += self._events_of(index, peer)
        for index, letter in enumerate(self.wire):
            found.append(Event("deliver", index))
            if self.left.faults and self._is_waited_for(letter):
                found.append(Event("lose", index))
                if not letter.is_reply:
                    found += [Event("double", index), Event("give up", index)]
        for index, asked in enumerate(self.asked):
            found += self._events_of_request(index, asked)
        if self.left.restarts:
            found.append(Event("restart the manager"))
        if self.manager._retired:
            found.append(Event("sweep"))
        if self.at_once and self.left.faults:
            found += [event._replace(how=how) for event in found if event.what in SPEAKING for how in MISHAPS]
        return found

    def _events_of(self, index: int, peer: Peer) -> list[Event]:
        engine = peer.engine
        found: list[Event] = []
        if not engine.cache.session:
            if not peer.waits["Register"]:
                found.append(Event("register", index))
        else:
            if not peer.waits[MUTATING]:
                found.append(Event("say", index))
            if self.left.restarts and any(s.number == engine.cache.session for s in self.manager.sessions):
                found.append(Event("expire", index))
        if engine.step:
            found.append(Event("end the step", index))
        elif engine.running:
            found.append(Event("begin a step", index))
            if self.left.forks and engine.to_fork() is not None:
                found.append(Event("fork", index))
        if self.left.restarts:
            found.append(Event("crash", index))
        return found

    def _events_of_request(self, index: int, asked: Asked) -> list[Event]:
        wanted = self.wanted[index]
        found: list[Event] = []
        current = self.peers[asked.worker].engine.find(wanted.name, asked.attempt)
        other = 1 - asked.worker
        if not asked.is_over:
            if not asked.attempt:
                if self.peers[wanted.worker].engine.cache.is_ready():
                    found.append(Event("ask", index))
            else:
                if self.peers[other].engine.cache.is_ready():
                    if current is None:
                        found.append(Event("go on elsewhere", index))
                    elif self.left.moves:
                        found.append(Event("move", index))
                if self.left.cancels and current is not None:
                    found.append(Event("cancel", index))
        # Of an attempt that the client has left it may tell the worker, or not.
        if any(attempt < asked.attempt for attempt, _, _ in self._streams(index)):
            found.append(Event("close the old stream", index))
        return found

    def _streams(self, index: int) -> list[tuple[int, TinyEngine, CacheSequence]]:
        """Requests for it that have not ended at the workers."""
        name = self.wanted[index].name
        return [
            (sequence.id.attempt, peer.engine, sequence)
            for peer in self.peers
            for sequence in [*peer.engine.waiting, *peer.engine.running]
            if sequence.id.sequence_id == name
        ]

    def _is_waited_for(self, letter: Letter) -> bool:
        return letter.call in self.peers[letter.worker].waits.values()

    # -- letting it happen

    def apply(self, event: Event) -> None:
        """Let it happen. Raises BrokenLaw."""
        what, index = event.what, event.at
        self.has_called = False
        if what == "deliver":
            self._deliver(self.wire.pop(index))
        elif what in ("lose", "double", "give up"):
            self._fault(what, index)
        elif what in ("ask", "move", "go on elsewhere", "cancel", "close the old stream"):
            self._of_client(what, index)
        elif what in ("restart the manager", "sweep", "expire", "crash"):
            self._of_fate(what, index)
        else:
            num_letters = len(self.wire)
            self._of_worker(what, index)
            self.has_called = len(self.wire) > num_letters
            if self.at_once and self.has_called:
                self._take_place(event.how)
        self._settle()

    def _spend(self, what: str) -> None:
        self.left = self.left._replace(**{what: getattr(self.left, what) - 1})

    def _take_place(self, how: str) -> None:
        """The call that has just been made, where calls take place at once."""
        last = len(self.wire) - 1
        if how == "slow":
            self._spend("faults")
        elif how in ("lost", "given up"):
            self._fault({"lost": "lose", "given up": "give up"}[how], last)
        else:
            if how == "doubled":
                self._fault("double", last)
            self._deliver(self.wire.pop())
            if self.wire and self.wire[-1].is_reply:
                if how == "unheard":
                    self._fault("lose", len(self.wire) - 1)
                else:
                    self._deliver(self.wire.pop())

    def _of_worker(self, what: str, index: int) -> None:
        peer = self._peer_to_change(index)
        engine = peer.engine
        if what == "begin a step":
            engine.begin_step()
        elif what == "fork":
            if engine.fork():
                self._spend("forks")
        elif what == "end the step":
            engine.end_step()
            self._hand_over()
        elif what == "register":
            peer.register_no += 1
            self._send(index, "Register", self._introduction(index))
        else:
            assert what == "say"
            call = engine.cache.next_call(engine.candidates, ASKING_AT)
            if call is not None:
                method = type(call.request).__name__.removesuffix("Request")
                self._send(index, method, call.request)

    def _introduction(self, index: int) -> cache_pb2.RegisterRequest:
        peer = self.peers[index]
        return cache_pb2.RegisterRequest(
            worker_id=f"w{index}",
            incarnation=peer.incarnation,
            register_no=peer.register_no,
            address="h:1",
            model_fingerprint=FINGERPRINT,
            kv_cache_config=peer.settings.kv_cache_config(),
            process_key=b"process %d" % peer.incarnation,
            predecessor_key=b"process %d" % (peer.incarnation - 1),
            holds_state=peer.engine.cache.state.holds_anything,
        )

    def _send(self, index: int, method: str, request: Message) -> None:
        peer = self.peers[index]
        peer.num_calls += 1
        self.wire.append(Letter(method, index, peer.num_calls, request.SerializeToString(deterministic=True)))
        peer.waits[kind_of(method)] = peer.num_calls

    def _hand_over(self) -> None:
        """Tokens reach the client, which takes them from its current attempt only."""
        for wanted, asked in zip(self.wanted, self.asked, strict=True):
            if not asked.attempt or asked.is_over:
                continue
            engine = self.peers[asked.worker].engine
            for sequence in [*engine.running, *engine.waiting, *engine.cache.state.sequences.values()]:
                if sequence.id == (wanted.name, asked.attempt):
                    told = tuple(sequence.tokens[len(wanted.prompt) :])
                    if told[: len(asked.delivered)] != asked.delivered:
                        raise BrokenLaw(f"one text: {wanted.name!r} was told {asked.delivered}, now {told}")
                    asked.delivered = told
            asked.is_over = len(asked.delivered) == wanted.max_new_tokens

    # -- messages

    def _deliver(self, letter: Letter) -> None:
        if letter.is_reply:
            if self._is_waited_for(letter):
                self._hear(letter)
            return
        reply = execute(self._manager_to_change(), letter, 0.0)
        if reply.refusal and reply.refusal not in LATE:
            raise BrokenLaw(f"an honest worker is not refused: {letter.method} was answered {reply.refusal}")
        # The transport hands an answer only to the call that waits for it.
        if self._is_waited_for(reply):
            self.wire.append(reply)

    def _hear(self, letter: Letter) -> None:
        """The answer that a worker waits for."""
        peer = self._peer_to_change(letter.worker)
        cache = peer.engine.cache
        kind = kind_of(letter.method)
        peer.waits[kind] = 0
        if kind == "Register":
            if not letter.refusal:
                cache.on_registered(response_of(letter))
                report = cache.state.link.report if cache.state.link is not None else None
                if report is not None:
                    report._parts = iter(list(report._parts))  # the same parts, in a form that can be copied
        else:
            call = self._call_in_flight(peer)
            if call is None:
                return  # its session was lost meanwhile
            if letter.refusal:
                cache.on_failure(call, letter.refusal, 0.0)
            else:
                cache.on_reply(call, response_of(letter), 0.0)
        self._forget_calls_of_lost_session(peer)

    def _call_in_flight(self, peer: Peer) -> MutatingCall | None:
        link = peer.engine.cache.state.link
        return None if link is None else link.in_flight

    def _forget_calls_of_lost_session(self, peer: Peer) -> None:
        """The edge cancels what it waits for when the session is lost."""
        if not peer.engine.cache.session or self._call_in_flight(peer) is None:
            peer.waits[MUTATING] = 0

    def _fault(self, what: str, index: int) -> None:
        self._spend("faults")
        letter = self.wire[index]
        if what == "double":
            self.wire.insert(index, letter)
            return
        if what == "lose":
            del self.wire[index]
        peer = self._peer_to_change(letter.worker)
        kind = kind_of(letter.method)
        peer.waits[kind] = 0
        call = self._call_in_flight(peer) if kind == MUTATING else None
        if call is not None:
            peer.engine.cache.on_failure(call, "", 0.0)

    # -- the client

    def _of_client(self, what: str, index: int) -> None:
        wanted, asked = self.wanted[index], self.asked[index]
        if what == "close the old stream":
            for worker in range(len(self.peers)):
                self._peer_to_change(worker)
            for attempt, engine, sequence in self._streams(index):
                if attempt < asked.attempt:
                    engine.remove(sequence)
            return
        if what == "cancel":
            self._spend("cancels")
            asked.is_over = True
            engine = self._peer_to_change(asked.worker).engine
            current = engine.find(wanted.name, asked.attempt)
            assert current is not None
            engine.remove(current)
            return
        if what == "ask":
            asked.worker = wanted.worker
        else:
            if what == "move":
                self._spend("moves")
            asked.worker = 1 - asked.worker
        asked.attempt += 1
        tokens = [*wanted.prompt, *asked.delivered]
        rest = wanted.max_new_tokens - len(asked.delivered)
        engine = self._peer_to_change(asked.worker).engine
        engine.submit(wanted.name, asked.attempt, wanted.salt, tokens, rest)

    # -- what nobody decides

    def _of_fate(self, what: str, index: int) -> None:
        if what == "sweep":
            manager = self._manager_to_change()
            while manager._completed:  # what reports were made of, which nothing else asks for
                manager.sweep()
            manager.sweep()
            return
        self._spend("restarts")
        if what == "restart the manager":
            self.manager = CacheManager(self._manager_to_change().epoch + 1)
        elif what == "expire":
            manager = self._manager_to_change()
            manager.worker(f"w{index}").lease_end = 0.0
            manager.tick(0.0)
        else:
            peer = self._peer_to_change(index)
            peer.incarnation += 1
            peer.register_no = 0
            peer.waits = dict.fromkeys(peer.waits, 0)
            peer.engine = TinyEngine(peer.settings)

    # -- after each event

    def _settle(self) -> None:
        for index, peer in enumerate(self.peers):
            if self.parts[1 + index] is not None:
                continue
            peer.engine.settle()
            self._forget_calls_of_lost_session(peer)
            failed, peer.engine.failed = peer.engine.failed, []
            for name, attempt, why in failed:
                for wanted, asked in zip(self.wanted, self.asked, strict=True):
                    if (wanted.name, asked.attempt, asked.worker) == (name, attempt, index) and not asked.is_over:
                        raise BrokenLaw(f"the newest attempt goes on: attempt {attempt} of {name!r} was {why}")
        self.wire = [letter for letter in self.wire if not self._is_inert(letter)]

    def _is_inert(self, letter: Letter) -> bool:
        """A letter that can never do anything any more, and whose answer nobody waits for. It is delivered at once, and must be
        refused, or be an answer that nobody hears."""
        if self._is_waited_for(letter):
            return False
        if letter.is_reply:
            return True
        if letter.method == "Register":
            known = self.manager._incarnations.known.get(f"w{letter.worker}")
            request = request_of(letter)
            if known is None or (request.incarnation, request.register_no) > known[:2]:
                return False
        else:
            uplink = request_of(letter).uplink
            session = self.manager._sessions.get(uplink.session)
            if session is not None and uplink.call_no > session.last_call_no:
                return False
        reply = execute(self.manager, letter, 0.0)
        if not reply.refusal.startswith("STALE_"):
            answered = reply.refusal or "as if it were new"
            raise BrokenLaw(f"a late {letter.method} does nothing: it was answered {answered}")
        return True

    # -- the end

    @property
    def is_over(self) -> bool:
        """Nothing is asked for, nothing under way, and nobody holds a block."""
        return (
            all(asked.is_over for asked in self.asked)
            and not self.wire
            and all(peer.engine.cache.is_idle and not peer.engine.step for peer in self.peers)
            and all(
                not session.sequences and not session.pools[0].num_reserved and session.pools[0].counts().held == 0
                for session in self.manager.sessions
            )
        )

    def require_laws(self) -> None:
        """All that must be true in every state. Raises BrokenLaw."""
        violations = self.manager.check().violations
        if violations:
            raise BrokenLaw(f"{violations[0].law}: {violations[0].message}")
        for peer in self.peers:
            peer.engine.require_laws()
        self._require_sealed()
        live: dict[str, Sequence] = {}
        for session in self.manager.sessions:
            for sequence in session.sequences.values():
                if not sequence.fenced and not session.recovering:
                    other = live.setdefault(sequence.key.sequence_id, sequence)
                    if other is not sequence:
                        raise BrokenLaw(f"one attempt lives: {other!r} and {sequence!r}")

    def _require_sealed(self) -> None:
        """What the manager would hand out as a hit is there."""
        for session in self.manager.sessions:
            peer = self.peers[int(session.worker_id[1:])]
            if peer.incarnation != session.registration.incarnation:
                continue  # the process that held it is gone, and the manager will hear of that with the next Register
            for pool in session.pools:
                for block in range(1, pool.num_blocks):
                    node = pool.node(block)
                    if node is None:
                        continue
                    data = b""
                    while node.parent is not None:
                        data, node = node.tokens + data, node.parent
                    salt = node.key[0].tenant_salt  # type: ignore[attr-defined]
                    tokens = tuple(memoryview(data).cast("I"))
                    found = peer.engine.slots[pool.slot].block(block)
                    expected = [
                        (salt, tokens[:count]) for count in range(len(tokens) - len(found) + 1, len(tokens) + 1)
                    ]
                    if found != expected:
                        where = f"block {block} of {session.worker_id} is sealed"
                        raise BrokenLaw(f"sealed-only sharing: {where}; it should hold {expected}, and holds {found}")
