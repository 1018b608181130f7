"""The requests of a worker in `kvpool top`: how fast they are, what stands in the list, and what users' names do to it."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvpool.cli.top.rates import SequenceMeter, SequenceName, sequence_name
from kvpool.cli.top.requests import num_lines_wanted, render_requests
from kvpool.process.printable import printable
from kvpool.v1 import cache_pb2, common_pb2

BLOCK_SIZE = 16
UUID = "3d6f0a9e-8f5c-4f0e-9f51-0a6d2c7e8b11"
MUCH = 1000
"""Lines of a terminal that has room for everything."""


def sequence(
    sequence_id: str,
    num_tokens: int = 100,
    num_computed: int = 96,
    *,
    attempt: int = 1,
    round: int = 0,
    num_cached: int = 0,
    fenced: bool = False,
) -> cache_pb2.SequenceDescription:
    return cache_pb2.SequenceDescription(
        key=common_pb2.SequenceKey(sequence_id=sequence_id, attempt=attempt, round=round),
        num_tokens=num_tokens,
        num_cached_tokens=num_cached,
        num_computed_tokens=num_computed,
        num_blocks=-(-num_tokens // BLOCK_SIZE),
        fenced=fenced,
    )


def worker_with(
    *sequences: cache_pb2.SequenceDescription, num_sequences: int | None = None, num_waiting: int = 0, session: int = 1
) -> cache_pb2.WorkerDescription:
    return cache_pb2.WorkerDescription(
        worker_id="w",
        session=session,
        kv_cache_config=common_pb2.KVCacheConfig(block_size=BLOCK_SIZE),
        num_sequences=len(sequences) if num_sequences is None else num_sequences,
        load=common_pb2.WorkerLoad(num_waiting=num_waiting),
        sequences=sequences,
    )


def drawn(
    worker: cache_pb2.WorkerDescription,
    width: int = 120,
    max_lines: int = MUCH,
    rates: dict[SequenceName, float | None] | None = None,
) -> list[str]:
    """The lines, as many as are allowed or wanted."""
    console = Console(width=width, height=MUCH)
    with console.capture() as capture:
        console.print(render_requests(worker, rates or {}, width, max_lines))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert len(lines) <= max_lines
    assert (len(lines) == num_lines_wanted(worker)) == (num_lines_wanted(worker) <= max_lines)
    assert max(map(len, lines)) <= width
    return lines


# -- rates; their window is that of the workers' rates


def test_the_rate_of_a_request_is_what_became_known_by_time() -> None:
    """Also of one that was preempted, whose next round is granted with all its tokens. With fewer tokens, in another session
    or attempt it is another request."""
    meter = SequenceMeter()

    def rate(at: float, *sequences: cache_pb2.SequenceDescription, session: int = 1, attempt: int = 1) -> float | None:
        meter.add(worker_with(*sequences, session=session), at)
        return meter.generated_tokens((session, "a", attempt))

    assert rate(0.0, sequence("a", 100), sequence("b", 10)) is None
    assert rate(1.0, sequence("a", 110, 0, round=1), sequence("b", 10), sequence("c", 10)) == 10
    assert [meter.generated_tokens((1, name, 1)) for name in "bcd"] == [0, None, None]
    assert rate(2.0, sequence("a", 105), sequence("a", 105, attempt=2)) == 2.5
    assert meter.generated_tokens((1, "a", 2)) is None
    assert rate(3.0, sequence("a", 20)) is None
    assert rate(4.0, sequence("a", 300), session=2) is None
    assert meter.generated_tokens((1, "a", 1)) is None


# -- the list


def test_each_request_has_a_row_with_what_is_known_of_it() -> None:
    first = sequence(UUID, 2048, 512, attempt=2, num_cached=256)
    second = sequence("chat-7", 1234, 1232, round=3)
    third = sequence("new", 100, 0, fenced=True)
    worker = worker_with(first, second, third, num_waiting=2)
    lines = drawn(worker, rates={sequence_name(worker, first): 0.0, sequence_name(worker, second): 1234.4})
    assert lines[0] == "requests of w: 3 hold blocks, the oldest first; 2 wait for a turn"
    heads = ["request", "state", "known tokens", "computed", "cached", "gen/s", "blocks", "attempt", "round"]
    assert re.split(r"  +", lines[1]) == heads
    assert lines[2].split() == [UUID, "prefilling", "2,048", "25%", "256", "0", "128", "2", "0"]
    assert lines[3].split() == ["chat-7", "decoding", "1,234", "100%", "0", "1,234", "78", "1", "3"]
    assert lines[4].split() == ["new", "fenced", "100", "0%", "0", "–", "7", "1", "0"]


@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "block_size", "state"),
    [
        (100, 0, 16, "prefilling"),  # just granted
        (100, 80, 16, "prefilling"),  # in the middle of the prompt
        (100, 96, 16, "decoding"),  # all its full blocks are reported
        (112, 112, 16, "decoding"),  # one more block was generated
        (97, 96, 16, "decoding"),
        (96, 80, 16, "prefilling"),  # the most that is ever cached of a prompt of full blocks
        (9, 8, 1, "decoding"),  # the last token is never computed
        (9, 7, 1, "prefilling"),
    ],
)
def test_a_request_that_lags_by_less_than_a_block_decodes(
    num_tokens: int, num_computed: int, block_size: int, state: str
) -> None:
    worker = worker_with(sequence("a", num_tokens, num_computed))
    worker.kv_cache_config.block_size = block_size
    assert drawn(worker)[2].split()[1] == state


def test_without_requests_that_hold_blocks_only_that_is_said() -> None:
    for num_waiting, words in ((0, ""), (1, "; 1 waits for a turn"), (5, "; 5 wait for a turn")):
        assert drawn(worker_with(num_waiting=num_waiting)) == [f"requests of w: none holds blocks{words}"]


@pytest.mark.parametrize("max_lines", [1, 2, 3, 4, 5, 20, 41, 42, 43, 60])
def test_what_does_not_fit_is_counted(max_lines: int) -> None:
    lines = drawn(worker_with(*(sequence(f"s{index}") for index in range(40))), max_lines=max_lines)
    assert "40 hold blocks" in lines[0]
    if max_lines >= 42:
        assert lines[2:] == [line for line in lines if " decoding " in line]
        assert len(lines) == 42
    elif max_lines >= 4:
        assert lines[2].startswith("s0 ")
        assert lines[-1] == f"… and {40 - (max_lines - 3)} more"
        assert len(lines) == max_lines
    else:
        assert len(lines) == 1


def test_requests_that_were_not_asked_for_are_counted_too() -> None:
    lines = drawn(worker_with(sequence("a"), sequence("b"), num_sequences=4096))
    assert lines[-1] == "… and 4,094 more"
    assert len(drawn(worker_with(sequence("a"), sequence("b"), num_sequences=3), max_lines=4)) == 4


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 111, 112, 120, 200])
def test_a_narrow_terminal_has_shorter_names_and_fewer_columns(width: int) -> None:
    lines = drawn(worker_with(sequence(UUID, 131_072, 65_536, num_cached=65_536)), width)
    heads, row = lines[1], lines[2]
    shown = row.split()
    assert shown[0] == UUID if width >= 112 else re.fullmatch(f"{UUID[:6]}.*…", shown[0])
    numbers = [
        ("known tokens", "131,072"),
        ("computed", "50%"),
        ("cached", "65,536"),
        ("gen/s", "–"),
        ("blocks", "8,192"),
        ("attempt", "1"),
        ("round", "0"),
    ]
    present = [(head, cell) for head, cell in numbers if head in heads]
    assert present == numbers[: len(present)]
    assert shown[2:] == [cell for _, cell in present]
    assert len(present) >= {20: 0, 40: 1, 60: 3, 80: 6, 100: 6}.get(width, 7)


# -- names that users give


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain-1", "plain-1"),
        ("größe 3 日本", "größe 3 日本"),
        ("\x1b[2J\x1b]0;mine\x07", r"\x1b[2J\x1b]0;mine\x07"),
        ("two\nlines\r\tand\x9b1m", r"two\nlines\r\tand\x9b1m"),
        ("\u202egnp\u2028\u200b", r"\u202egnp\u2028\u200b"),
        ("[red]not[/red] [/]", "[red]not[/red] [/]"),
        (":smile: \\[bold]", ":smile: \\[bold]"),
    ],
)
def test_a_name_is_shown_and_does_nothing(given: str, shown: str) -> None:
    assert printable(given) == shown
    worker = worker_with(sequence(given), sequence("next"))
    worker.worker_id = given
    lines = drawn(worker)
    assert len(lines) == 4
    assert lines[0].startswith(f"requests of {shown}: 2 ")
    assert lines[2].startswith(f"{shown} ")
    assert lines[3].startswith("next ")


def test_the_longest_name_takes_no_more_room_than_a_usual_one() -> None:
    lines = drawn(worker_with(sequence("\x00" * 128), sequence("日" * 40), sequence("a")))
    assert [cell_len(line[: line.index("decoding")]) for line in lines[2:]] == [36 + 2] * 3
    assert all("…" in line for line in lines[2:4])
