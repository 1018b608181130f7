"""Drives ModelRunner with an encoder-decoder model as an engine would, with block tables made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from kvpool.worker_service.attention.selection import make_torch
from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.attention.torch_plan import Shapes
from kvpool.worker_service.engine.sampling_params import SamplingParams
from kvpool.worker_service.engine.step import EncoderBlocks, SampledToken, SequencePart, Step
from kvpool.worker_service.model.forward.kv_plan import CrossPlan, KVCachePlan
from kvpool.worker_service.model.load import LoadedModel
from tests.model.paged import BLOCK_SIZE, GREEDY, NEVER
from tests.tiny_models import Beam


class Oracle:
    """transformers' own generate in float32, with eager attention."""

    def __init__(self, model: PreTrainedModel, use_cache: bool = True) -> None:
        self._model = model.eval()
        self._use_cache = use_cache

    @classmethod
    def of(cls, path: Path, use_cache: bool = True) -> Oracle:
        model = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        return cls(model, use_cache)

    def beams(self, tokens: Sequence[int], num_new: int, prompt: Sequence[int], num_beams: int) -> list[Beam]:
        """All texts of `num_new` tokens that a search over the encoder's input finds, best first."""
        input_ids = torch.tensor([tokens])
        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                decoder_input_ids=torch.tensor([prompt]),
                max_new_tokens=num_new,
                do_sample=False,
                num_beams=num_beams,
                num_return_sequences=num_beams,
                use_cache=self._use_cache,
                eos_token_id=None,
                pad_token_id=0,
                forced_bos_token_id=None,
                forced_eos_token_id=None,
                output_scores=True,
                return_dict_in_generate=True,
            )
        texts = output.sequences[:, len(prompt) :].tolist()
        return [Beam(*found) for found in zip(texts, output.sequences_scores.tolist(), strict=True)]

    def logits(self, tokens: Sequence[int], num_new: int, prompt: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """The greedy continuation of the decoder's prompt over the encoder's input, and the logits [num_new, vocab_size] that
        each of its tokens was chosen by."""
        input_ids = torch.tensor([tokens])
        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                decoder_input_ids=torch.tensor([prompt]),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                num_beams=1,
                use_cache=self._use_cache,
                eos_token_id=None,
                pad_token_id=0,
                forced_bos_token_id=None,
                forced_eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        found: list[int] = output.sequences[0, len(prompt) :].tolist()
        return found, torch.cat(output.logits)


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
        shapes: Shapes | None = None,
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

    def run(self, requests: Sequence[Request], chunk: int = NEVER, stagger: int = 0) -> None:
        """Run all requests to their end: prompts in chunks of at most `chunk`, request i joining at step i · stagger."""
        for request in requests:
            request.computed = request.start
        step_no = 0
        while any(len(request.sampled) < request.num_new for request in requests):
            running = [
                request
                for index, request in enumerate(requests)
                if index * stagger <= step_no and len(request.sampled) < request.num_new
            ]
            parts = [_next_part(request, chunk) for request in running]
            for request, part, result in zip(running, parts, self.runner.execute(Step(parts)), strict=True):
                request.computed += len(part.token_ids)
                assert result.bad_logits is None, "a slot that nobody has written was read"
                assert (result.token is None) == (part.sampling is None)
                if result.token is not None:
                    request.sampled.append(result.token)
            step_no += 1


def _next_part(request: Request, chunk: int) -> SequencePart:
    known = [*request.prompt, *request.token_ids]
    tokens = known[request.computed : request.computed + chunk]
    reaches_end = request.computed + len(tokens) == len(known)
    is_first = request.computed == request.start
    return SequencePart(
        tokens,
        request.computed,
        (request.table,),
        request.sampling if reaches_end else None,
        encoder=request.encoder if is_first else request.encoder._replace(token_ids=()),
    )
