"""What the benchmarks measure, and how they report it."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from transformers import LlamaConfig

from bench.floors import Cost, ModelSizes
from bench.machine_speed import MachineSpeed, measure_speed
from bench.manager_scale import LEAST_BLOCKS, MEASUREMENTS
from bench.neighbours import STEPS_PER_TURN, NextTo, busy_programs, measure_turns
from bench.report import Series, command_line, report_as
from bench.steps import BLOCK_SIZE, step
from kvpool.load.arrivals import ClosedLoop
from kvpool.load.plan import CacheCase, LoadPlan
from kvpool.load.workload import LoadWorkload, RequestSizes

# -- the least time of work on a machine


SIZES = ModelSizes(
    num_layer_weights=100, num_head_weights=10, bytes_per_number=2, num_kv_numbers=3, num_flop_per_pair=1000
)
BYTES = MachineSpeed(read_bytes_per_s=1.0, flop_per_s=1e30)
"""Products cost nothing."""
PRODUCTS = MachineSpeed(read_bytes_per_s=1e30, flop_per_s=1.0)


def test_a_step_reads_the_weights_once_and_a_shared_prefix_once() -> None:
    found = SIZES.cost(num_sequences=4, num_new=1, num_before=50, num_shared=48)
    assert found == Cost(2 * (110 + (48 + 4 * 3) * 3), 2 * 4 * 110 + 1000 * 4 * 51)


def test_a_step_takes_as_long_as_its_slower_half() -> None:
    speed = MachineSpeed(read_bytes_per_s=10.0, flop_per_s=100.0)
    assert speed.floor_s(20, 100) == 2.0
    assert speed.floor_s(20, 300) == 3.0


def test_other_programs_can_only_lower_a_speed() -> None:
    assert MachineSpeed(2.0, 3.0).at_best(MachineSpeed(1.0, 4.0)) == MachineSpeed(2.0, 4.0)
    assert MachineSpeed(2.0, 3.0).at_best(None) == MachineSpeed(2.0, 3.0)


def test_a_shared_prefix_is_computed_once_and_when_it_is_warm_not_at_all() -> None:
    """3 × (5 shared + 2 + 2): Σ of pairs is that of attention, and each token but an answer's last is computed."""
    plan = LoadPlan(LoadWorkload.SHARED, ClosedLoop(3), 3, RequestSizes(5, 2, 2))
    tokens, rows = 5 + 3 * 2 + 3, 3 + 3
    pairs = (1 + 2 + 3 + 4 + 5) + 3 * (6 + 7) + 3 * 8
    assert SIZES.workload_floor_s(plan, CacheCase.COLD, PRODUCTS) == 2 * (100 * tokens + 10 * rows) + 1000 * pairs
    tokens, pairs = 3 + 3, 3 * 7 + 3 * 8
    assert SIZES.workload_floor_s(plan, CacheCase.WARM, PRODUCTS) == 2 * (100 * tokens + 10 * rows) + 1000 * pairs


def test_a_chat_computes_what_is_new_in_each_turn() -> None:
    """2 users, 3 turns of 4 + 2 tokens: the last token of an answer is computed with the next turn."""
    plan = LoadPlan(LoadWorkload.CHATS, ClosedLoop(2), 2, RequestSizes(0, 4, 2, turns=3))
    tokens, rows = 2 * (4 + 1 + 5 + 1 + 5 + 1), 2 * 6
    pairs = 2 * sum(range(1, 18))
    assert SIZES.workload_floor_s(plan, CacheCase.COLD, PRODUCTS) == 2 * (100 * tokens + 10 * rows) + 1000 * pairs
    keys = [2 * length for length in (4, 5, 10, 11, 16, 17)]
    assert SIZES.workload_floor_s(plan, CacheCase.COLD, BYTES) == sum(2 * (110 + 3 * count) for count in keys)


@pytest.mark.parametrize("is_tied", [False, True])
def test_sizes_are_those_of_the_models_parameters(is_tied: bool, tmp_path: Path) -> None:
    """Embeddings are read by row; those that are the head's weights too are read once."""
    LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=is_tied,
    ).save_pretrained(tmp_path)  # fmt: skip
    in_layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert ModelSizes.of_folder(tmp_path, "bfloat16") == ModelSizes(
        num_layer_weights=2 * in_layer + 32,
        num_head_weights=300 * 32,
        bytes_per_number=2,
        num_kv_numbers=2 * 2 * 16,
        num_flop_per_pair=4 * 2 * 32,
    )


@pytest.mark.compiler
def test_the_speed_of_this_machine_can_be_measured() -> None:
    speed = measure_speed("float32", 1)
    assert speed.read_bytes_per_s > 1e6
    assert speed.flop_per_s > 1e6


# -- the command line that all have


def test_no_run_at_all_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(None, runs=5).parse_args(["--runs", "0"])
    assert "argument --runs: must be at least 1, got 0" in capsys.readouterr().err


def test_a_series_shows_median_least_and_most() -> None:
    series = Series("ours", [1.5, 0.5, 3.0])
    assert series.spread == "1.50 s (500 ms to 3.00 s)"
    assert str(series) == "1.50 s (500 ms to 3.00 s, 3 runs)"


@pytest.mark.parametrize(
    ("given", "out", "written"),
    [
        ([], "tables\n", None),
        (["--json"], '{"figure": 1}\n', None),
        (["--json", "found.json"], "tables\n", {"figure": 1}),
    ],
)
def test_json_is_printed_instead_of_the_tables_or_written_next_to_them(
    given: list[str],
    out: str,
    written: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = command_line(None, runs=5, json_file=True).parse_args(given)
    assert arguments.runs == 5
    report_as(arguments.json, {"figure": 1}, lambda: print("tables"))
    assert capsys.readouterr().out == out
    assert [json.loads(file.read_text()) for file in tmp_path.iterdir()] == ([] if written is None else [written])


# -- programs next to steps


def test_busy_programs_run_within_the_context_alone() -> None:
    with busy_programs(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert [process.returncode for process in processes] == [-9, -9]


def test_turns_alternate_and_the_warm_up_does_not_count() -> None:
    done: list[str] = []
    milliseconds = count()
    found = measure_turns(
        lambda: done.append("one"), lambda: done.append("all"), 1, 2, lambda: next(milliseconds) / 1000
    )
    assert done == (["one"] * STEPS_PER_TURN + ["all"] * STEPS_PER_TURN) * 3
    assert len(found.one_thread) == len(found.all_threads) == 2 * STEPS_PER_TURN


def test_a_turn_of_long_steps_is_one_step() -> None:
    seconds = count()
    found = measure_turns(lambda: None, lambda: None, 0, 3, lambda: next(seconds))
    assert found.one_thread == found.all_threads == [1] * 3


def test_the_ratio_is_above_one_if_more_threads_are_slower() -> None:
    assert NextTo(1, [2.0, 1.0, 9.0], [3.0, 3.0, 1.0]).ratio == 1.5


# -- steps


def test_sequences_share_the_blocks_of_their_prefix_and_no_other() -> None:
    num_before = 5 * BLOCK_SIZE
    parts = step(3, 2, num_before, num_shared=2 * BLOCK_SIZE).parts
    tables = [part.block_tables[0] for part in parts]
    assert [(part.start, len(part.token_ids)) for part in parts] == [(num_before, 2)] * 3
    assert [len(table) for table in tables] == [6] * 3  # two tokens begin a block
    assert [table[:2] for table in tables] == [[1, 2]] * 3
    own = [block for table in tables for block in table[2:]]
    assert len(set(own)) == len(own)
    assert min(own) == 3


# -- the manager


@pytest.mark.parametrize("name", ["register", "route", "report"])
def test_a_measurement_runs_with_the_fewest_blocks_that_the_command_takes(name: str) -> None:
    assert MEASUREMENTS[name](LEAST_BLOCKS)
