"""Encodes the answers of Route, Describe and Check. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.v1 import cache_pb2

from .core.block_pool import State
from .core.candidates import ServedModel
from .core.description import BlockContent, BlockDescription
from .core.facts import SequenceFacts, WorkerFacts, sequence_facts, worker_facts
from .core.integrity import Audit, Violation
from .core.routing import RoutedWorker
from .core.salts import SaltNumbers
from .core.session import Session
from .group_codec import TIER, encode_config
from .worker_codec import encode_counts, encode_key, encode_load, encode_unsalted_root

MAX_VIOLATIONS = 256
"""Most violations in one answer of Check."""

BLOCK_STATES: dict[State, cache_pb2.BlockState] = {
    state: getattr(cache_pb2, f"BLOCK_STATE_{state.name}") for state in State
}


def encode_route(
    workers: Iterable[RoutedWorker], served: ServedModel | None, explanation: str
) -> cache_pb2.RouteResponse:
    """Encode the ranked workers; `explanation` says why there are none."""
    return cache_pb2.RouteResponse(
        workers=[
            cache_pb2.RoutedWorker(
                worker_id=worker.session.worker_id,
                address=worker.session.registration.address,
                model_fingerprint=worker.session.registration.model_fingerprint,
                num_cached_tokens=worker.num_cached_tokens,
                num_in_flight_tokens=worker.num_in_flight_tokens,
                load=encode_load(worker.load),
                encoder_cached=worker.encoder_cached,
            )
            for worker in workers
        ],
        explanation=explanation,
        model=None
        if served is None
        else cache_pb2.ServedModel(
            facts_digest=served.newest.facts_digest,
            max_model_len=served.max_model_len,
            max_encoder_tokens=served.longest_input,
        ),
    )


def explain_no_room(request: cache_pb2.RouteRequest, served: ServedModel) -> str:
    """Say why Route names none of the model's workers."""
    num_needed = request.num_needed_tokens
    if num_needed > served.max_model_len:
        return f"the text may reach {num_needed} tokens, and the worker with the most room takes {served.max_model_len}"
    if request.num_encoder_tokens > served.longest_input:
        return (
            f"the input of the encoder has {request.num_encoder_tokens} tokens, and the worker with the most room takes "
            f"{served.longest_input}"
        )
    return f"no worker has room for both {num_needed} tokens of text and {request.num_encoder_tokens} of an encoder's input"


def explain_no_worker(fingerprint: str, sessions: Iterable[Session]) -> str:
    """Say why no worker of a model can be named."""
    sessions = [session for session in sessions if session.registration.address]
    of_model = [s for s in sessions if fingerprint in ("", s.registration.model_fingerprint)]
    reporting = sorted(s.worker_id for s in of_model if s.recovering)
    if reporting:
        return (
            f"the workers of this model are still reporting their blocks: {', '.join(reporting)}; ask again in a moment"
        )
    unheard = sorted(s.worker_id for s in of_model if s.is_unheard)
    if unheard:
        return (
            "workers of this model register again and again and do not call, as if no answer reached them: "
            f"{', '.join(unheard)}; look at the network from the manager to them"
        )
    leaving = sorted(s.worker_id for s in of_model if s.draining)
    if leaving:
        return f"all workers of this model are leaving: {', '.join(leaving)}; start another one"
    models = sorted({f"{s.registration.model_name!r} ({s.registration.model_fingerprint})" for s in sessions})
    if not models:
        return "no worker that serves text is registered: start one, or read its log if it runs"
    shown = ", ".join(models[:8]) + (f" and {len(models) - 8} more" if len(models) > 8 else "")
    return f"no live worker serves the model with fingerprint {fingerprint[:128]!r}; served are {shown}"


def encode_worker(
    session: Session, blocks: Iterable[BlockDescription], max_sequences: int, now: float
) -> cache_pb2.WorkerDescription:
    """Encode a worker, a page of its block map and its first sequences. `now` is the manager's monotonic time in seconds."""
    description = encode_facts(worker_facts(session))
    description.lease_remaining_ms = remaining_ms(session.lease_end, now)
    description.blocks.extend(map(encode_block, blocks))
    description.sequences.extend(map(encode_sequence, sequence_facts(session, max_sequences)))
    return description


def encode_facts(facts: WorkerFacts) -> cache_pb2.WorkerDescription:
    """Encode a worker without its lease, blocks and sequences."""
    registration = facts.registration
    return cache_pb2.WorkerDescription(
        worker_id=registration.worker_id,
        address=registration.address,
        session=facts.session,
        incarnation=registration.incarnation,
        model_name=registration.model_name,
        model_fingerprint=registration.model_fingerprint,
        kv_cache_config=encode_config(registration.layout),
        max_model_len=facts.max_model_len,
        counts=encode_counts(facts.counts),
        load=encode_load(facts.load),
        num_sequences=facts.num_sequences,
        totals=cache_pb2.WorkerTotals(
            num_prompt_tokens=facts.num_prompt_tokens,
            num_cached_tokens=facts.num_cached_tokens,
            num_evicted_blocks=facts.num_evicted_blocks,
            num_calls=facts.num_calls,
            num_generated_tokens=facts.num_generated_tokens,
        ),
        draining=facts.draining,
        recovering=facts.recovering,
        facts_digest=facts.facts_digest,
        max_encoder_tokens=facts.longest_input,
    )


def remaining_ms(end: float, now: float) -> int:
    """Return the milliseconds from `now` to `end`, both in monotonic seconds; 0 after `end`."""
    return max(0, round((end - now) * 1000))


def encode_sequence(sequence: SequenceFacts) -> cache_pb2.SequenceDescription:
    """Encode a live sequence."""
    return cache_pb2.SequenceDescription(
        key=encode_key(sequence.key),
        num_tokens=sequence.num_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_blocks=sequence.num_blocks,
        fenced=sequence.fenced,
    )


def encode_block(block: BlockDescription) -> cache_pb2.BlockDescription:
    """Encode the state of one block."""
    return cache_pb2.BlockDescription(
        group=block.group,
        tier=TIER,
        block_id=block.block,
        state=BLOCK_STATES[block.state],
        ref_count=block.ref_count,
        generation=block.generation,
        token_count=block.token_count,
        sealed=block.sealed,
        block_hash=block.block_hash,
        table_index=block.table_index,
        owners=map(encode_key, block.owners),
        free_list_position=block.free_list_position,
    )


def encode_block_content(content: BlockContent, salts: SaltNumbers, epoch: int) -> cache_pb2.DescribeBlockResponse:
    """Encode one block and its content."""
    root = content.root
    return cache_pb2.DescribeBlockResponse(
        epoch=epoch,
        block=encode_block(content.block),
        root=None if root is None else encode_unsalted_root(root),
        salt_number=0 if root is None else salts.number(root.tenant_salt),
        tokens=content.tokens,
        prefix_block_ids=content.prefix_blocks,
        owner_block_ids=content.owner_blocks,
    )


def encode_audit(audit: Audit) -> cache_pb2.CheckResponse:
    """Encode the violations and the number of things checked."""
    return cache_pb2.CheckResponse(
        violations=map(_encode_violation, audit.violations[:MAX_VIOLATIONS]),
        num_blocks_checked=audit.num_blocks,
        num_sequences_checked=audit.num_sequences,
        num_nodes_checked=audit.num_nodes,
        num_sessions_checked=audit.num_sessions,
    )


def _encode_violation(violation: Violation) -> cache_pb2.Violation:
    return cache_pb2.Violation(
        law=violation.law,
        message=violation.message,
        worker_id=violation.worker_id,
        session=violation.session,
        block_id=violation.block,
        sequence=None if violation.sequence is None else encode_key(violation.sequence),
        group=violation.group,
    )
