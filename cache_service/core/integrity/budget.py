"""The law of the budget, on all live sessions at one moment."""

from __future__ import annotations

from collections.abc import Sequence as List

from ..budget import Budget
from ..session import Session
from .findings import Audit


def compare_budget(sessions: List[Session], budget: Budget, findings: Audit) -> None:
    """Each session's account is what its pool and its sequences have, and the totals are the sums of the accounts. Takes place
    within one slice, some 0.2 ms per 1,000 sequences."""
    num_blocks = num_slots = num_tokens = 0
    for session in sessions:
        account = session.account
        num_blocks += account.num_blocks
        num_slots += account.num_blocks * account.block_size
        num_tokens += account.num_sequence_tokens
        has = sum(pool.last_granted for pool in session.pools) + session.num_blockless_contents
        if account.num_blocks != has:
            findings.add("budget", f"the session counts for {account.num_blocks} blocks, it has {has}", session)
        has = sum(sequence.num_tokens for sequence in session.sequences.values())
        if account.num_sequence_tokens != has:
            findings.add(
                "budget",
                f"the session counts for {account.num_sequence_tokens} tokens, its sequences have {has}",
                session,
            )
    for name, kept, found in (
        ("blocks", budget.num_blocks, num_blocks),
        ("token slots", budget.num_slots, num_slots),
        ("tokens of sequences", budget.num_sequence_tokens, num_tokens),
    ):
        if kept != found:
            findings.add("budget", f"all workers together count for {kept} {name}, the sum over them is {found}")
