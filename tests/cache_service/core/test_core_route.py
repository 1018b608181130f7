"""Route: where a prompt has the least left to compute. It looks, it advises, and it changes nothing."""

from __future__ import annotations

import xxhash

from kvpool.cache_service.core.messages import AllocateItem, Root
from kvpool.cache_service.core.refusal import Reason
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import Lockstep, key, refused, registration, token_bytes
from tests.cache_service.core.test_core_past_mistakes import lines_of

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
