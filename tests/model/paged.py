"""Drives ModelRunner as an engine would, also with an encoder, with block tables made by hand."""

from __future__ import annotations

import os
import random
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvpool.worker_service.attention.invariance import FIXED_SHAPES
from kvpool.worker_service.attention.layer import AttentionBackend
from kvpool.worker_service.attention.selection import CANDIDATES, make_torch
from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.attention.torch_plan import PlanShapes
from kvpool.worker_service.model import runtimes
from kvpool.worker_service.model.forward.kv_plan import CrossPlan, KVCachePlan, StatesPlan
from kvpool.worker_service.model.forward.mixer import state_bytes
from kvpool.worker_service.model.forward.modules import ModulesRuntime
from kvpool.worker_service.model.forward.packed_linear import packing_works
from kvpool.worker_service.model.forward.runner import ModelRunner
from kvpool.worker_service.model.load import LoadedModel, load_model
from kvpool.worker_service.model.memory.facts import kv_bytes_per_token
from kvpool.worker_service.model.settings import ModelSettings, RuntimeName
from kvpool.worker_service.native.cpu.weights import PackedModel
from kvpool.worker_service.step import (
    EncoderBlocks,
    PartResult,
    SampledToken,
    SamplingParams,
    SequencePart,
    StateBlocks,
    Step,
)

BLOCK_SIZE = 4
_NUM_STATE_BLOCKS = 64
NUM_THREADS = int(os.environ.get("KVPOOL_TEST_THREADS", "1"))
"""Of torch. One by default: products are tiny, and tests that run beside others should not wait for their cores."""
NEEDS_PACKING = pytest.mark.skipif(
    not packing_works(torch.float32), reason="this torch has no packed float32 products: nothing is packed"
)
NEVER = 1 << 60
"""As min_shared_tokens: no prefix is ever attended once for several sequences."""
SHORT_SEGMENTS = FIXED_SHAPES[0]._replace(partition=8, key_multiple=8)
"""Segments of keys of which a short prefix fills one, so that it can be shared."""
GREEDY = SamplingParams(num_logprobs=3)


class Place(NamedTuple):
    """What a model runs on, and over."""

    device: str
    backend: str
    """A BackendName, or native: the native step attends itself."""

    @property
    def runtime(self) -> RuntimeName:
        return "native" if self.backend == "native" else "torch"

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """What it needs of the machine."""
        if self.device != "cpu":
            return [pytest.mark.gpu]
        return [pytest.mark.native] if self.backend == "native" else []

    def __str__(self) -> str:
        return f"{self.device}-{self.backend}"


NATIVE = Place("cpu", "native")
PLACES = [
    Place("cpu", "torch"),
    NATIVE,
    *(Place("cuda:0", name) for name in ("torch", *(candidate.name for candidate in CANDIDATES))),
]


def quiet(_: str) -> None:
    """Progress that nobody wants to read."""


def load(folder: Path | str, say: Callable[[str], None] = quiet, **settings: Any) -> LoadedModel:
    """In float32 on a CPU by torch unless `settings`, those of ModelSettings, say otherwise; its cache is in the model's folder."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "cache_dir": Path(folder) / "cache",
        "runtime": "torch",
        "block_size": BLOCK_SIZE,
    }
    torch.set_num_threads(NUM_THREADS)
    return load_model(ModelSettings(str(folder), **{**defaults, **settings}), say)


def next_token(loaded: LoadedModel, tokens: Sequence[int]) -> int:
    """The likeliest one after a few tokens, by a runner that is closed again."""
    runner = loaded.runner(KVCachePlan.one_group(3, 16, 1))
    try:
        (result,) = runner.execute(Step([SequencePart(list(tokens), 0, ([1, 2],), GREEDY)]))
    finally:
        runner.close()
    assert result.token is not None
    return result.token.token_id


def recorded_steps(monkeypatch: pytest.MonkeyPatch, max_num_tokens: int = NEVER) -> list[Step]:
    """The steps from now on, which run as ever. Those of more tokens run out of memory."""
    steps, execute = list[Step](), ModelRunner.execute

    def recording(runner: ModelRunner, step: Step) -> list[PartResult]:
        steps.append(step)
        if sum(len(part.token_ids) for part in step.parts) > max_num_tokens:
            raise torch.OutOfMemoryError("there is no more")
        return execute(runner, step)

    monkeypatch.setattr(ModelRunner, "execute", recording)
    return steps


def loaded_models(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Those whose weights are loaded from now on. Of those before, none may have any weights by then, natively or in modules."""
    load_weights, found = runtimes.RuntimeLoader._load_weights, list[weakref.ref[Any]]()
    packed: list[weakref.ref[PackedModel]] = []
    pack = PackedModel.__init__

    def packing(model: PackedModel, *rest: Any) -> None:
        packed.append(weakref.ref(model))
        pack(model, *rest)

    def loading(*arguments: Any) -> Any:
        assert not any(reference() for reference in packed), "a packed model is in memory"
        assert not any(reference() for reference in found), "a model of torch is in memory"
        model = load_weights(*arguments)
        found.append(weakref.ref(model))
        return model

    monkeypatch.setattr(PackedModel, "__init__", packing)
    monkeypatch.setattr(runtimes.RuntimeLoader, "_load_weights", loading)
    return found


@dataclass
class Request:
    """One sequence to be run, and what came of it."""

    prompt: Sequence[int]
    table: list[int]
    num_new: int
    start: int = 0
    """Positions below are in the table's blocks already."""
    sampling: SamplingParams = GREEDY
    sampled: list[SampledToken] = field(default_factory=list)
    chunk: int = NEVER
    """Tokens of its prompt that a step computes, at most."""
    computed: int = -1
    running: int = 0
    """Block of its running state, if the model has recurrent layers."""
    source: int = 0
    """Block with the state after the tokens before `start`."""
    snapshots: dict[int, int] = field(default_factory=dict)
    """By number of tokens before it: the block that is to get the state there. A chunk ends there."""
    encoder: EncoderBlocks | None = None
    """Of an encoder-decoder model, whose `prompt` is the decoder's and begins with its start token."""

    def encoder_now(self) -> EncoderBlocks | None:
        """For the next part: the first one brings the encoder's input."""
        if self.encoder is None or self.computed == self.start:
            return self.encoder
        return self.encoder._replace(token_ids=())

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.sampled]

    @property
    def logprobs(self) -> list[float]:
        return [token.logprobs.logprob for token in self.sampled if token.logprobs is not None]


class RequestLoop(ABC):
    """Runs requests over a cache, as an engine would."""

    runner: ModelRunner

    @abstractmethod
    def next_part(self, request: Any, chunk: int = NEVER) -> SequencePart:
        """The request's next tokens, at most `chunk`."""

    def run(self, requests: Sequence[Request], chunk: int = NEVER, stagger: int = 0) -> None:
        """Run all requests to their end: prompts in chunks of at most `chunk`, request i joining at step i · stagger.

        A request that has generated tokens already is computed again from its start, as after a preemption.
        """
        for request in requests:
            request.computed = request.start
        step_no = 0
        while any(len(request.sampled) < request.num_new for request in requests):
            running = [
                request
                for index, request in enumerate(requests)
                if index * stagger <= step_no and len(request.sampled) < request.num_new
            ]
            parts = [self.next_part(request, chunk) for request in running]
            for request, part, result in zip(running, parts, self.runner.execute(Step(parts)), strict=True):
                request.computed += len(part.token_ids)
                assert result.bad_logits is None, "a slot that nobody has written was read"
                assert (result.token is None) == (part.sampling is None)
                if result.token is not None:
                    request.sampled.append(result.token)
            step_no += 1


class PagedModel(RequestLoop):
    """A loaded model with a cache whose unwritten slots and states are NaN and whose blocks come in random order."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int = 256,
        min_shared_tokens: int = NEVER,
        shapes: PlanShapes | None = None,
        backend: AttentionBackend | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """backend: None takes plain torch with min_shared_tokens and shapes, which another one knows nothing of. shapes: None takes
        those that a worker would take here."""
        self._free = list(range(1, num_blocks))
        random.Random(3).shuffle(self._free)
        self._block_size = block_size
        self.partition: int | None = None
        """Of the keys, if plain torch attends; None: it cuts nowhere."""
        if backend is None and isinstance(loaded.runtime, ModulesRuntime):
            shapes = (
                shapes or make_torch(loaded.runtime.dtype, loaded.runtime.device, loaded.runtime.attention_needs).shapes
            )
            self.partition = shapes.partition
            backend = TorchAttention(loaded.runtime.dtype, min_shared_tokens, shapes)
        mixers = loaded.runtime.mixers
        self._free_states = list(range(_NUM_STATE_BLOCKS - 1, 0, -1)) if mixers else []
        states = StatesPlan(_NUM_STATE_BLOCKS, state_bytes(mixers)) if mixers else None
        cross = None
        if loaded.encoder is not None:
            cross = CrossPlan(num_blocks, 0, loaded.encoder.max_tokens)
        self._free_cross = list(range(1, num_blocks))
        random.Random(4).shuffle(self._free_cross)
        num_bytes = kv_bytes_per_token(loaded.runtime.layers, loaded.runtime.dtype)
        plan = KVCachePlan.one_group(
            num_blocks, block_size, num_bytes, states, attends=bool(loaded.runtime.layers), cross=cross
        )
        self.runner = loaded.runner(plan, backend)
        self.runner.kv_cache.fill(float("nan"))

    def request(
        self,
        prompt: Sequence[int],
        num_new: int,
        shared: Sequence[int] = (),
        sampling: SamplingParams = GREEDY,
        source: int = 0,
        encoder: EncoderBlocks | None = None,
    ) -> Request:
        """A request with blocks of its own after `shared`, full blocks that hold the beginning of its prompt, over the same input
        if there is an encoder. source: its state."""
        needed = -(-(len(prompt) + num_new) // self._block_size) - len(shared)
        own = [self._free.pop() for _ in range(needed)]
        return Request(
            prompt,
            [*shared, *own],
            num_new,
            start=len(shared) * self._block_size,
            sampling=sampling,
            running=self.state_block() if self.runner.kv_cache.states is not None else 0,
            source=source,
            encoder=encoder,
        )

    def encoder(self, tokens: Sequence[int]) -> EncoderBlocks:
        """Blocks for an encoder's input, to be brought with the first part."""
        table = [self._free_cross.pop() for _ in range(-(-len(tokens) // self._block_size))]
        return EncoderBlocks(table, len(tokens), tokens)

    def state_block(self) -> int:
        """A block of states that nobody uses."""
        return self._free_states.pop()

    def block_bytes(self, blocks: Sequence[int], encoder: EncoderBlocks | None = None) -> list[torch.Tensor]:
        """A copy of all layers' KV of the blocks, and of those with the encoder's output."""
        layers = self.runner.kv_cache.layers
        tables = [list(encoder.table if encoder is not None and layer.is_cross else blocks) for layer in layers]
        pairs = zip(layers, tables, strict=True)
        return [cache[table].clone() for layer, table in pairs for cache in (layer.k_cache, layer.v_cache)]

    def next_part(self, request: Request, chunk: int = NEVER) -> SequencePart:
        start, known = request.computed, [*request.prompt, *request.token_ids]
        end = min(
            [start + min(chunk, request.chunk), len(known), *(place for place in request.snapshots if place > start)]
        )
        tables = (request.table,) * len(self.runner.kv_cache.plan.groups)
        sampling = request.sampling if end == len(known) else None
        state = None
        if request.running:
            source = request.source if start == request.start else request.running
            state = StateBlocks(source, request.running, request.snapshots.get(end, 0))
        return SequencePart(known[start:end], start, tables, sampling, state=state, encoder=request.encoder_now())
