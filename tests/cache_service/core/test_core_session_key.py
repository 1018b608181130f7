"""A session is changed by those only who know its key, and no number that its worker counts up can be used up by one message."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.cache_service.core.incarnations import MAX_FIRST_REGISTER_NO
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Limits, ReportPart, Uplink, WorkerLoad
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.session import SessionEnd
from kvpool.cache_service.core.session_key import NO_KEY, SessionKey
from tests.cache_service.core.lockstep import registration, snapshot

KEY = SessionKey(range(16))

Call = Callable[[CacheManager, int, SessionKey], object]

CALLS: dict[str, Call] = {
    "allocate": lambda manager, session, key: manager.allocate(Uplink(session, 1, key=key), []),
    "append": lambda manager, session, key: manager.append(Uplink(session, 1, reserve_wish=3, key=key), []),
    "free": lambda manager, session, key: manager.free(Uplink(session, 1, key=key), []),
    "report": lambda manager, session, key: manager.report(Uplink(session, 1, key=key), ReportPart(0, True)),
    "keep_alive": lambda manager, session, key: manager.keep_alive(session, 0, WorkerLoad(), 5.0, key=key),
    "deregister": lambda manager, session, key: manager.deregister(session, key),
}


def refused(call: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong", [NO_KEY, SessionKey(15), SessionKey(16), SessionKey(range(17))], ids=len)
def test_a_call_with_another_key_changes_nothing(name: str, wrong: SessionKey) -> None:
    manager = CacheManager(1)
    holds_state = name == "report"
    session = manager.register(registration()._replace(holds_state=holds_state), 0.0, KEY).session
    before = snapshot(manager)
    assert refused(lambda: CALLS[name](manager, session, wrong)).reason is Reason.WRONG_KEY
    assert snapshot(manager) == before
    CALLS[name](manager, session, KEY)
    assert snapshot(manager) != before


def test_a_session_without_a_key_takes_none() -> None:
    """Of a caller in the same process; one that states a key means another session."""
    manager = CacheManager(1)
    session = manager.register(registration(), 0.0).session
    assert refused(lambda: manager.allocate(Uplink(session, 1, key=KEY), [])).reason is Reason.WRONG_KEY
    manager.allocate(Uplink(session, 1), [])


def test_each_registration_has_the_key_that_it_was_given() -> None:
    """The key of a session that was fenced opens nothing."""
    manager = CacheManager(1)
    manager.register(registration(), 0.0, KEY)
    second = manager.register(registration(register_no=2), 0.0, SessionKey(b"another")).session
    assert refused(lambda: manager.deregister(second, KEY)).reason is Reason.WRONG_KEY
    ended = manager.deregister(second, SessionKey(b"another"))
    assert ended is not None
    assert ended.number == second
    assert manager.deregister(second, KEY) is None, "it has ended, whatever the key"
    assert manager.ended[SessionEnd.DEREGISTERED] == 1


def test_all_keys_have_one_text() -> None:
    """So that none is shown by a log line, a repr or an error message."""
    for key in (KEY, NO_KEY):
        assert {repr(key), str(key), f"{key}"} == {"<session key>"}
    assert "key=<session key>" in repr(Uplink(1, 1, key=KEY))


# -- bounds


@pytest.mark.parametrize("number", [1 << 20, (1 << 20) + 1, 1 << 63, (1 << 64) - 1])
def test_a_call_no_is_taken_up_to_its_bound(number: int) -> None:
    manager = CacheManager(1)
    session = manager.register(registration(), 0.0).session
    before = snapshot(manager)
    if number > Limits().max_numbers_skipped:
        refusal = refused(lambda: manager.free(Uplink(session, number), []))
        assert (refusal.reason, refusal.field) == (Reason.BAD_FIELD, "uplink.call_no")
        assert "1048576" in refusal.message
        assert snapshot(manager) == before
        number = 1
    manager.free(Uplink(session, number), [])
    manager.free(Uplink(session, number + 1), [])


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    manager = CacheManager(1)
    session = manager.register(registration(), 0.0).session
    reply = manager.free(Uplink(session, 1, reserve_wish=2), [])
    assert [entry.number for entry in reply.entries] == [1]
    before = snapshot(manager)
    for call in (
        lambda: manager.free(Uplink(session, 2, 2), []),
        lambda: manager.keep_alive(session, 2, WorkerLoad(), 1.0),
    ):
        assert refused(call).field == "downlink_ack"
    assert snapshot(manager) == before
    assert manager.free(Uplink(session, 2, 1), []).entries == ()


def test_a_restarted_manager_takes_the_register_no_of_a_worker_that_has_tried_for_long() -> None:
    """It knows none; and whatever a stranger has stated in the worker's place, something is left above it."""
    manager = CacheManager(1)
    assert (
        refused(lambda: manager.register(registration(register_no=MAX_FIRST_REGISTER_NO + 1), 0.0)).field
        == "register_no"
    )
    manager.register(registration(register_no=MAX_FIRST_REGISTER_NO), 0.0)
    overtaken = refused(lambda: manager.register(registration(register_no=7), 0.0))
    assert (overtaken.reason, overtaken.metadata) == (
        Reason.STALE_REGISTER,
        {"register_no": str(MAX_FIRST_REGISTER_NO)},
    )
    furthest = MAX_FIRST_REGISTER_NO + Limits().max_numbers_skipped
    assert refused(lambda: manager.register(registration(register_no=furthest + 1), 0.0)).field == "register_no"
    manager.register(registration(register_no=furthest), 0.0)
    manager.deregister(manager.register(registration(register_no=furthest + 1), 0.0).session)
    manager.register(registration(incarnation=2, register_no=1), 0.0)
