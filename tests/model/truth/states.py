"""Models with recurrent layers, over blocks of states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpool.worker_service.model.forward.modules import ModulesRuntime
from tests.model.paged import BLOCK_SIZE, SHORT_SEGMENTS, PagedModel
from tests.model.truth.dense import LONG, Paged, tiny_model
from tests.model.truth.subject import Hit, Models
from tests.tiny_models import MAX_MODEL_LEN

ARCHITECTURES = ("lfm2", "qwen3_next", "mamba2", "jamba", "falcon_h1")
"""Convolutions alone; a gated delta net; no layer that attends; a scan that forgets its state; layers that attend and have a state
too."""
SHARED = 20
"""Tokens that the prompts LONG and LONG + 1 begin with."""


def states_of(paged: PagedModel, block: int) -> list[torch.Tensor]:
    """A copy of all layers' states in a block."""
    states = paged.runner.kv_cache.states
    assert states is not None
    return [tensor[block].clone() for tensor in states]


class States(Paged):
    """One whose texts go on from a snapshot."""

    def hit(self, spoils: bool = False) -> Hit:
        """Two at once, one of them with another end."""
        paged = self.paged(min_shared_tokens=1, shapes=SHORT_SEGMENTS)
        prompts, num_new = self.tiny.prompts, self.tiny.num_new_tokens
        first = paged.request(prompts[LONG], 1)
        snapshot = first.snapshots[SHARED] = paged.state_block()
        paged.run([first], chunk=16)
        before, shared = states_of(paged, snapshot), first.table[: SHARED // BLOCK_SIZE]
        if spoils:
            for tensor in paged.runner.kv_cache.states or ():
                tensor[snapshot] = tensor[snapshot].flip(0) + 100.0
        sharers = [paged.request(prompts[index], num_new, shared, source=snapshot) for index in (LONG, LONG + 1)]
        paged.run(sharers, chunk=7, stagger=1)
        truths = self.truths[LONG : LONG + 2]
        return Hit([each.sampled for each in sharers], truths, before, states_of(paged, snapshot))


def make(architecture: str, is_serial: bool, models: Models) -> States:
    """`is_serial`: its recurrent layers have no scan, so several tokens are computed one after the other."""
    tiny, truths = tiny_model(architecture, models)
    loaded = models.loaded(architecture, max_model_len=MAX_MODEL_LEN)
    if is_serial:
        assert isinstance(loaded.runtime, ModulesRuntime)
        mixers = [mixer._replace(scan=None) for mixer in loaded.runtime.mixers]
        assert all(mixer.is_serial for mixer in mixers)
        loaded = replace(loaded, runtime=replace(loaded.runtime, mixers=mixers))
    return States(tiny, loaded, truths)


def subjects() -> Iterator[Any]:
    """One of each kind, and one token by token."""
    for architecture in ARCHITECTURES:
        yield pytest.param((make, architecture, False), id=architecture)
    yield pytest.param((make, "jamba", True), id="jamba token by token")
