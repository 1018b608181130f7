"""Encoder-decoder models over the paged pool: bits, and groups with windows. test_truth.py has their texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.engine.step import EncoderBlocks, SequencePart, Step
from kvpool.worker_service.model.forward.kv_plan import CrossPlan, GroupPlan, KVCachePlan
from kvpool.worker_service.model.forward.layers import groups_of
from tests.model.paged import BLOCK_SIZE, GREEDY, NEEDS_PACKING, NEVER, PagedModel, Request
from tests.model.truth.encoders import make
from tests.model.truth.subject import NUM_NEW

# transformers' own modules, imported by these models, annotate in a way that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")


@NEEDS_PACKING
def test_bits_are_the_same_alone_and_packed(tmp_path: Path) -> None:
    """If the worker promises it, which it tries at load."""
    subject = make("umt5", tmp_path)
    backend = subject.loaded.attention_backend("torch", BLOCK_SIZE, lambda _: None)
    promise = subject.loaded.try_batch_invariance(backend).facts.batch_invariance
    assert promise.is_promised, promise.reason
    found = []
    for together in (False, True):
        paged = PagedModel(subject.loaded)
        pairs = zip(subject.prompts, subject.inputs, strict=True)
        requests = [paged.request(prompt, NUM_NEW, encoder=paged.encoder(given)) for prompt, given in pairs]
        for some in [requests] if together else [[request] for request in requests]:
            paged.run(some, chunk=5, stagger=1)
        found.append([request.logprobs for request in requests])
    assert found[0] == found[1]


def test_windows_have_blocks_of_their_own_and_the_cross_group_comes_last(tmp_path: Path) -> None:
    """T5Gemma over its real groups: full attention, a window, the encoder's output."""
    subject = make("t5gemma", tmp_path)
    windows = [group.window for group in groups_of(subject.loaded.layers)]
    assert windows == [None, 8]
    groups = tuple(GroupPlan(index, window, 40, 0) for index, window in enumerate(windows))
    plan = KVCachePlan(BLOCK_SIZE, groups, cross=CrossPlan(40, 0, 64))
    runner = subject.loaded.runner(plan, TorchAttention(torch.float32, NEVER))
    assert {layer.group for layer in runner.kv_cache.layers if layer.is_cross} == {2}
    runner.kv_cache.fill(float("nan"))
    given, prompt = subject.inputs[2], subject.prompts[1]
    encoder = EncoderBlocks(list(range(30, 30 - 11, -1)), len(given), given)
    full, window = list(range(1, 13)), list(range(21, 33))
    request = Request(prompt, full, NUM_NEW, computed=0)
    while len(request.sampled) < NUM_NEW:
        known, done = [*prompt, *request.token_ids], request.computed
        # What has left the window is gone.
        gone = max(0, done + 1 - 8) // BLOCK_SIZE
        tables = (full, [0] * gone + window[gone:])
        part = SequencePart(known[done : done + 5], done, tables, None, encoder=encoder)
        request.computed += len(part.token_ids)
        (result,) = runner.execute(Step([part._replace(sampling=GREEDY if request.computed == len(known) else None)]))
        encoder = encoder._replace(token_ids=())
        if result.token is not None:
            request.sampled.append(result.token)
    subject.answer(given, prompt).check(request.sampled, subject.tolerance)
