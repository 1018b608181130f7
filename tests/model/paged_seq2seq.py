"""Drives ModelRunner with an encoder-decoder model as an engine would, with block tables made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from kvpool.worker_service.attention.selection import make_torch
from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.attention.torch_plan import PlanShapes
from kvpool.worker_service.engine.sampling_params import SamplingParams
from kvpool.worker_service.engine.step import EncoderBlocks, SampledToken, SequencePart
from kvpool.worker_service.model.forward.kv_plan import CrossPlan, KVCachePlan
from kvpool.worker_service.model.load import LoadedModel
from tests.model.paged import BLOCK_SIZE, GREEDY, NEVER, run_all
from tests.tiny_models import Beam, Generating


class Oracle(Generating):
    """The truth of an encoder-decoder model."""

    auto_class = AutoModelForSeq2SeqLM

    def beams(self, tokens: Sequence[int], num_new: int, prompt: Sequence[int], num_beams: int) -> list[Beam]:
        """All texts of `num_new` tokens that a search over the encoder's input finds, best first."""
        output = self._over_input(
            tokens, num_new, prompt, num_beams=num_beams, num_return_sequences=num_beams, output_scores=True
        )
        texts = output.sequences[:, len(prompt) :].tolist()
        return [Beam(*found) for found in zip(texts, output.sequences_scores.tolist(), strict=True)]

    def logits(self, tokens: Sequence[int], num_new: int, prompt: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """The greedy continuation of the decoder's prompt over the encoder's input, and the logits [num_new, vocab_size] that
        each of its tokens was chosen by."""
        output = self._over_input(tokens, num_new, prompt, min_new_tokens=num_new, num_beams=1, output_logits=True)
        found: list[int] = output.sequences[0, len(prompt) :].tolist()
        return found, torch.cat(output.logits)

    def _over_input(self, tokens: Sequence[int], num_new: int, prompt: Sequence[int], **options: Any) -> Any:
        """No id ends a text, or is forced."""
        return self.generate(
            tokens,
            num_new,
            decoder_input_ids=torch.tensor([prompt]),
            eos_token_id=None,
            forced_bos_token_id=None,
            forced_eos_token_id=None,
            **options,
        )


@dataclass(eq=False)
class Request:
    """One sequence to be run, and what came of it."""

    prompt: Sequence[int]
    """The decoder's, which begins with its start token."""
    table: list[int]
    encoder: EncoderBlocks
    num_new: int
    start: int = 0
    """Positions below are in the table's blocks already."""
    sampling: SamplingParams = GREEDY
    sampled: list[SampledToken] = field(default_factory=list)
    chunk: int = NEVER
    """Tokens of its prompt that a step computes, at most."""
    computed: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.sampled]


class PagedSeq2Seq:
    """A loaded encoder-decoder model with a cache whose unwritten slots are NaN and whose blocks come in random order."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int = 256,
        min_shared_tokens: int = NEVER,
        shapes: PlanShapes | None = None,
    ) -> None:
        assert loaded.facts.encoder is not None
        self._free, self._free_cross = (list(range(1, num_blocks)) for _ in range(2))
        random.Random(3).shuffle(self._free)
        random.Random(4).shuffle(self._free_cross)
        shapes = shapes or make_torch(loaded.dtype, loaded.device, loaded.attention_needs).shapes
        cross = CrossPlan(num_blocks, 0, loaded.facts.encoder.max_tokens)
        plan = KVCachePlan.one_group(num_blocks, BLOCK_SIZE, 0, cross=cross)
        self.runner = loaded.runner(plan, TorchAttention(loaded.dtype, min_shared_tokens, shapes))
        self.runner.kv_cache.fill(float("nan"))

    def encoder(self, tokens: Sequence[int]) -> EncoderBlocks:
        """Blocks for an input, to be brought with the first part."""
        table = [self._free_cross.pop() for _ in range(-(-len(tokens) // BLOCK_SIZE))]
        return EncoderBlocks(table, len(tokens), tokens)

    def request(
        self,
        prompt: Sequence[int],
        encoder: EncoderBlocks,
        num_new: int,
        shared: Sequence[int] = (),
        sampling: SamplingParams = GREEDY,
    ) -> Request:
        """shared: full blocks that hold the beginning of its prompt over the same input."""
        needed = -(-(len(prompt) + num_new) // BLOCK_SIZE) - len(shared)
        own = [self._free.pop() for _ in range(needed)]
        start = len(shared) * BLOCK_SIZE
        return Request(prompt, [*shared, *own], encoder, num_new, start=start, sampling=sampling)

    def block_bytes(self, blocks: Sequence[int], encoder: EncoderBlocks) -> list[torch.Tensor]:
        """A copy of all layers' KV of the decoder's blocks, and of those with the encoder's output."""
        layers = self.runner.kv_cache.layers
        tables = [torch.tensor(encoder.table if layer.is_cross else blocks) for layer in layers]
        pairs = zip(layers, tables, strict=True)
        return [cache[table].clone() for layer, table in pairs for cache in (layer.k_cache, layer.v_cache)]

    def run(self, requests: Sequence[Request], chunk: int = NEVER, stagger: int = 0) -> None:
        """Run all requests to their end: prompts in chunks of at most `chunk`, request i joining at step i · stagger."""
        run_all(self.runner, requests, lambda request: _next_part(request, chunk), stagger)


def _next_part(request: Request, chunk: int) -> SequencePart:
    known = [*request.prompt, *request.token_ids]
    tokens = known[request.computed : request.computed + min(chunk, request.chunk)]
    reaches_end = request.computed + len(tokens) == len(known)
    is_first = request.computed == request.start
    return SequencePart(
        tokens,
        request.computed,
        (request.table,),
        request.sampling if reaches_end else None,
        encoder=request.encoder if is_first else request.encoder._replace(token_ids=()),
    )
