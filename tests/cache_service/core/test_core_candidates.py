"""Route: which workers it names, and that with many of them it looks at few and answers as if it looked at all, up to ties."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import xxhash

from kvpool.cache_service.core import routing
from kvpool.cache_service.core.candidates import SEQUENCE_COST_TOKENS
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import AllocateItem, Granted, Root, WorkerLoad
from kvpool.cache_service.core.refusal import Reason
from kvpool.cache_service.core.session import Session
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import FINGERPRINT, Lockstep, key, refused, registration, token_bytes
from tests.cache_service.core.test_core_past_mistakes import lines_of

OF_AN_INPUT = Root(FINGERPRINT, input_digest=b"i" * 32)


class Cluster:
    """Workers of one model, of several block sizes and layouts, and what a prompt costs on each, by definition."""

    def __init__(self, rng: random.Random, *, with_encoder: bool) -> None:
        self.rng = rng
        self.lockstep = Lockstep()
        self.with_encoder = with_encoder
        self.desks: list[Desk] = []
        self.prompt = [rng.randrange(2) for _ in range(40)]
        self.names = iter(range(1_000_000))
        for _ in range(rng.randint(8, 16)):
            self.join()

    @property
    def manager(self) -> CacheManager:
        return self.lockstep.manager

    def join(self) -> None:
        size = self.rng.choice([2, 4, 4, 4])
        kind = self.rng.choice(["full", "full", "full", "window"])
        most = self.rng.choice([60, 60, 30])
        num_blocks: tuple[int, ...] = (most,) if kind == "full" else (most, 40)
        windows = () if kind == "full" else ((0, 0), (5, 6))
        if self.with_encoder:
            num_blocks += (12,)
        self.desks.append(
            Desk(
                num_blocks,
                size,
                worker_id=f"w{next(self.names)}",
                lockstep=self.lockstep,
                windows=windows,
                max_encoder_tokens=16 if self.with_encoder else 0,
            )
        )

    def root(self) -> Root:
        return OF_AN_INPUT if self.with_encoder else ROOT

    def step(self) -> None:
        """Something happens to one of the workers."""
        desk, dice = self.rng.choice(self.desks), self.rng.random()
        if dice < 0.4:
            tokens = self.prompt[: self.rng.randrange(1, 41)] + [7] * self.rng.randrange(4)
            encoder = {"num_encoder_tokens": 9} if self.with_encoder else {}
            name = f"s{next(self.names)}"
            outcome = desk.allocate(name, tokens, no_wait=True, root=self.root(), **encoder)
            if isinstance(outcome, Granted) and self.rng.random() < 0.5 and not self.with_encoder:
                desk.report(name, self.rng.randrange(outcome.num_cached_tokens, len(tokens) + 1))
                if self.rng.random() < 0.5:
                    desk.free(name)
        elif dice < 0.8:
            load = WorkerLoad(
                num_running=self.rng.randrange(4),
                num_waiting=self.rng.choice([0, 0, 3]),
                num_uncomputed_tokens=self.rng.choice([0, 0, 10, 40]),
            )
            self.manager.keep_alive(desk.number, 0, load, 0.0)
        elif dice < 0.9:
            self.join()
        elif len(self.desks) > 6:
            self.desks.remove(desk)
            if dice < 0.95:
                self.lockstep.deregister(desk.number)
            else:
                self.manager.keep_alive(desk.number, 0, WorkerLoad(), 0.0, draining=True)

    def costs(self, tokens: list[int], num_needed_tokens: int) -> dict[Session, int]:
        """Of a prompt on each worker that takes it and has room for the text."""
        found = {}
        for desk in self.desks:
            session = desk.session
            if num_needed_tokens > session.max_model_len:
                continue
            modelled = self.lockstep.model.session(session.number)
            _, in_flight = self.lockstep.model.reach(modelled, self.root(), tokens)
            num_running = max(session.load.num_running, len(session.sequences))
            cost = len(tokens) - in_flight + session.load.num_uncomputed_tokens
            cost += SEQUENCE_COST_TOKENS * (num_running + session.load.num_waiting)
            has_input = any(sequence.root.key[0] == OF_AN_INPUT for sequence in session.sequences.values())
            if self.with_encoder and not has_input and not self.lockstep.model.has_unit(modelled, self.root()):
                cost += 9
            found[session] = cost
        return found


@pytest.mark.parametrize("with_encoder", [False, True], ids=["decoders", "encoder-decoders"])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_are_the_best_of_all(monkeypatch: pytest.MonkeyPatch, seed: int, with_encoder: bool) -> None:
    """In clusters that count as large or as small: some hold beginnings of the prompt, most, or none, load comes and goes, and some
    workers are too small for the text."""
    rng = random.Random(seed)
    monkeypatch.setattr(routing, "FEW", rng.choice([0, 2, 5, 99]))
    monkeypatch.setattr(routing, "NEIGHBOURS", rng.choice([1, 3]))
    cluster = Cluster(rng, with_encoder=with_encoder)
    for _ in range(60):
        cluster.step()
        tokens = [*cluster.prompt[: rng.randrange(1, 41)], 1]
        num_needed_tokens = rng.choice([0, 0, 60, 118, 200, 400])
        costs = cluster.costs(tokens, num_needed_tokens)
        for most in (1, 3, 7, 0):
            num_encoder_tokens = 9 if with_encoder else 0
            routed = cluster.manager.route(
                cluster.root(),
                token_bytes(tokens),
                most,
                num_encoder_tokens=num_encoder_tokens,
                num_needed_tokens=num_needed_tokens,
            )
            sessions = [one.session for one in routed]
            assert len(set(sessions)) == len(sessions)
            assert [costs[session] for session in sessions] == sorted(costs.values())[: most or None]
            for one in routed:
                modelled = cluster.lockstep.model.session(one.session.number)
                reach = cluster.lockstep.model.reach(modelled, cluster.root(), tokens)
                assert (one.num_cached_tokens, one.num_in_flight_tokens) == reach
        served, sessions = cluster.manager.served_model(cluster.root()), [desk.session for desk in cluster.desks]
        assert served == (
            max(sessions, key=lambda session: session.number),
            max(session.max_model_len for session in sessions),
            max(session.longest_input for session in sessions),
        )


def test_workers_that_take_no_input_of_that_length_are_left_out() -> None:
    """Each worker has a limit of its own, by its encoder or by its pool."""
    lockstep = Lockstep()
    limits = {"w1": (12, 8), "w2": (12, 16), "w3": (4, 16), "decoder": (12, 0)}
    for name, (num_blocks, most) in limits.items():
        num_pools = (60, num_blocks) if most else 60
        Desk(num_pools, worker_id=name, lockstep=lockstep, max_encoder_tokens=most)
    for num_tokens, expected in (
        (1, {"w1", "w2", "w3"}),
        (8, {"w1", "w2", "w3"}),
        (12, {"w2", "w3"}),
        (13, {"w2"}),
        (17, set()),
    ):
        routed = lockstep.manager.route(OF_AN_INPUT, token_bytes([1]), num_encoder_tokens=num_tokens)
        assert {one.session.worker_id for one in routed} == expected
    served = lockstep.manager.served_model(ROOT)
    assert served is not None
    assert (served.newest.worker_id, served.longest_input) == ("decoder", 16)


def fleet(num_workers: int) -> CacheManager:
    """Idle workers."""
    manager = CacheManager(1)
    for index in range(num_workers):
        manager.register(registration(f"worker-{index}"), 0.0)
    return manager


def first_choice(manager: CacheManager, prompt: list[int]) -> str:
    """The worker that a prompt goes to."""
    (best,) = manager.route(ROOT, token_bytes(prompt), 1)
    return best.session.worker_id


def test_equal_cold_prompts_meet_and_different_ones_spread_over_many_idle_workers() -> None:
    manager = fleet(200)
    chosen = Counter(first_choice(manager, [number, 1, 2, 3]) for number in range(4000))
    assert len(chosen) == 200
    assert max(chosen.values()) < 3 * 20
    for number in range(50):
        assert first_choice(manager, [number, 1, 2, 3, 9]) == first_choice(manager, [number, 1, 2, 3])
    inputs = [ROOT._replace(input_digest=bytes([number]) * 32) for number in range(50)]
    chosen_for = {manager.route(root, token_bytes([1]), 1)[0].session.worker_id for root in inputs}
    assert len(chosen_for) > 25, "an encoder's input counts too"


def test_a_worker_that_comes_or_goes_moves_few_prompts() -> None:
    """Or their caches would be at the wrong places."""
    manager = fleet(200)
    before = [first_choice(manager, [number, 1, 2, 3]) for number in range(1000)]
    manager.register(registration("one more"), 0.0)
    after = [first_choice(manager, [number, 1, 2, 3]) for number in range(1000)]
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert 0 < len(moved) < 100


def test_where_nobody_asks_for_routes_no_session_is_kept() -> None:
    manager = CacheManager(1)
    for number in range(1, 30):
        manager.register(registration("w", register_no=number), 0.0)
    assert len(manager._candidates.touched) == 1
    manager.deregister(manager.sessions[0].number)
    assert not manager._candidates.touched
    assert not manager.route(ROOT, token_bytes([1]))


PROMPT = list(range(17))


def cluster(num_workers: int = 3, block_size: int = 4) -> list[Desk]:
    """Workers of one manager."""
    lockstep = Lockstep()
    return [Desk(block_size=block_size, worker_id=f"w{i}", lockstep=lockstep) for i in range(num_workers)]


def ranking(worker: Desk, prompt: list[int], root: Root = ROOT) -> list[str]:
    """Worker ids, best first."""
    return [routed.session.worker_id for routed in worker.manager.route(root, token_bytes(prompt))]


def test_a_held_block_counts_after_one_that_is_computed_again() -> None:
    """Two sequences computed the first block; the one that serves hits was let go first and is gone, the second block is not."""
    worker = Desk(num_blocks=8)
    worker.grant("first", PROMPT[:5])
    worker.report("first", 5)
    worker.grant("second", PROMPT[:9], max_cached_tokens=0)
    worker.report("second", 9)
    worker.free("first")
    worker.free("second")
    worker.grant("other", list(range(50, 71)))
    worker.free("other")
    worker.grant("again", PROMPT[:5])
    (routed,) = worker.manager.route(ROOT, token_bytes(PROMPT))
    assert (routed.num_cached_tokens, routed.num_in_flight_tokens) == (0, 8)
    worker.lockstep.route(ROOT, token_bytes(PROMPT))


def test_a_worker_that_leaves_is_named_no_more_from_that_moment_on() -> None:
    """By an order, or by its own decision, which a heartbeat tells whose load is the one before; and an order that it has not heard
    of holds for the session that it begins meanwhile."""
    workers = cluster()
    manager = workers[0].manager
    workers[0].serve("a", [99])  # one that never calls seems not to hear the manager, and is not named either
    assert set(ranking(workers[0], PROMPT)) == {"w0", "w1", "w2"}
    manager.drain("w0")
    assert set(ranking(workers[0], PROMPT)) == {"w1", "w2"}
    load = manager.worker("w1").load
    manager.keep_alive(workers[1].number, 0, load, 0.0, draining=True)
    assert ranking(workers[0], PROMPT) == ["w2"]
    manager.register(manager.worker("w0").registration._replace(register_no=2), 0.0)
    assert ranking(workers[0], PROMPT) == ["w2"]


def test_cold_ties_are_broken_by_the_hash_of_the_first_block() -> None:
    workers = cluster(3)
    winners = set()
    for i in range(60):
        prompt = [i, 1, 2, 3]
        expected = sorted(
            ("w0", "w1", "w2"),
            key=lambda name: xxhash.xxh64_intdigest(name.encode() + b"\0" + token_bytes(prompt)),
        )
        assert ranking(workers[0], [*prompt, 7]) == ranking(workers[0], [*prompt, 8, 9]) == expected
        winners.add(expected[0])
    assert winners == {"w0", "w1", "w2"}


def test_an_empty_fingerprint_means_the_only_model() -> None:
    """A client that names no model is served while there is one; with several it must choose, and the refusal lists them. An
    engine that serves no text does not count."""
    (worker,) = cluster(1)
    worker.serve("a", PROMPT)
    engine = registration("engine")._replace(address="", model_fingerprint="toy", model_name="Toy")
    worker.manager.register(engine, 0.0)
    (routed,) = worker.manager.route(Root(""), token_bytes(PROMPT))
    assert routed.num_cached_tokens == 16
    worker.manager.register(registration("other")._replace(model_fingerprint="model-b", model_name="Bee"), 0.0)
    refusal = refused(worker.manager.route, Root(""), token_bytes(PROMPT))
    assert (refusal.reason, refusal.field) == (Reason.BAD_FIELD, "root.model_fingerprint")
    assert "(Bee, a model)" in refusal.message
    assert ranking(worker, PROMPT, Root("toy")) == []


def test_only_workers_of_the_model_are_candidates() -> None:
    (worker,) = cluster(1)
    worker.manager.register(registration("other")._replace(model_fingerprint="model-b"), 0.0)
    assert ranking(worker, PROMPT) == ["w0"]
    assert ranking(worker, PROMPT, Root("model-b")) == ["other"]
    assert ranking(worker, PROMPT, Root("unknown")) == []


def test_sharers_of_a_prompt_cost_route_no_more_than_one() -> None:
    """What Route executes grows with the depth, the holders and the workers, not with the sequences that compute the prompt."""
    costs = []
    for num_sharers in (1, 30):
        workers = cluster(3, block_size=1)
        tokens = list(range(20))
        for worker in workers:
            for i in range(num_sharers):
                item = AllocateItem(key(f"{worker.worker_id} {i}"), ROOT, token_bytes(tokens), 1, True, 0)
                worker.manager.allocate(worker.uplink(), [item])
        costs.append(lines_of(lambda: workers[0].manager.route(ROOT, token_bytes([*tokens, 1]))))  # noqa: B023
    assert costs[1] <= 2 * costs[0], costs
