"""What is wrong with a stream, and with a cluster's logs."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.client import Chunk, Completion, DeadlineExceeded, FinishReason, KvpoolError
from tests.cluster.cluster import Cluster
from tests.load.workload import Call

BAD_LINES = ("[error", "[critical", "Traceback", "BAD_REPORT", "all blocks are given up")


@dataclass
class Delivered:
    """What a stream has delivered so far."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    workers: list[str] = field(default_factory=list)
    """That delivered tokens, in order."""
    misplaced: list[str] = field(default_factory=list)
    """Chunks that do not follow the tokens before them."""

    @property
    def has_moved(self) -> bool:
        return len(self.workers) > 1

    def add(self, chunk: Chunk) -> None:
        if chunk.start_index != len(self.tokens):
            self.misplaced.append(f"a chunk for token {chunk.start_index} after {len(self.tokens)} tokens")
        self.tokens += chunk.token_ids
        self.text += chunk.text
        if chunk.token_ids and chunk.worker_id not in self.workers[-1:]:
            self.workers.append(chunk.worker_id)


End = Completion | KvpoolError | None
"""How a stream ended: read to the end, by an error, or left by its reader."""


def outcome(call: Call, end: End) -> str:
    if end is None:
        return "left by its reader"
    if isinstance(end, Completion):
        return f"whole, {end.finish_reason}"
    return "out of time" if _ran_out_of_time(call, end) else type(end).__name__


def problems(call: Call, delivered: Delivered, end: End, *, may_move: bool) -> list[str]:
    """What differs from the reference answer; only a stream that was read to the end must have all of it."""
    tokens, num_wanted = delivered.tokens, call.max_tokens
    found = list(delivered.misplaced)
    for index, (token, right) in enumerate(zip(tokens, call.reference.token_ids, strict=False)):
        if token != right:
            found.append(f"token {index} is {token}, not {right}")
            break
    if len(tokens) > num_wanted or (isinstance(end, Completion) and len(tokens) < num_wanted):
        found.append(f"{len(tokens)} tokens instead of {num_wanted}")
    if delivered.has_moved and not may_move:
        found.append("moved without need")
    if isinstance(end, KvpoolError) and not _ran_out_of_time(call, end):
        found.append(f"{type(end).__name__}: {end}")
    if isinstance(end, Completion):
        if (end.token_ids, end.text) != (tuple(tokens), delivered.text):
            found.append("the whole answer is not the sum of its chunks")
        if end.finish_reason != FinishReason.LENGTH:
            found.append(f"finish reason {end.finish_reason}, not {FinishReason.LENGTH}")
        if end.num_prompt_tokens != len(call.reference.request.prompt):
            found.append(f"{end.num_prompt_tokens} prompt tokens, not {len(call.reference.request.prompt)}")
        if call.reference.text not in (None, end.text) and end.token_ids == call.reference.token_ids:
            found.append("the right tokens, but another text")
    return found


def _ran_out_of_time(call: Call, end: KvpoolError) -> bool:
    return isinstance(end, DeadlineExceeded) and "timeout" in call.options


def bad_log_lines(cluster: Cluster) -> list[str]:
    """Lines that no fault excuses: errors, tracebacks, reports that were refused."""
    return [
        f"log of {name}: {line.strip()}"
        for name, process in cluster.processes.items()
        for line in process.log.splitlines()
        if any(sign in line for sign in BAD_LINES)
    ]
