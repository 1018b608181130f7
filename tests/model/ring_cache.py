"""A cache with real groups of layers, made by hand: blocks that leave a window are gone at once, and come back where it hurts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import cycle

import torch

from kvpool.worker_service.attention.layer import AttentionBackend
from kvpool.worker_service.model.forward.kv_plan import CrossPlan, GroupPlan, KVCachePlan
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.model.memory.facts import group_needs
from kvpool.worker_service.step import SampledToken, SequencePart
from tests.model.paged import BLOCK_SIZE, GREEDY, NEVER, Request, RequestLoop
from tests.model.truth.subject import Way

NAN = float("nan")


class Form(Enum):
    """What a table has where a block has left the window."""

    HOLES = "holes"
    """0."""
    STALE = "stale"
    """The block that was there, which by now is NaN, or holds later tokens of this sequence or another one."""


@dataclass
class Text(Request):
    """One with a block table for each group."""

    tables: tuple[list[int], ...] = ()
    num_gone: list[int] = field(default_factory=list)
    """Leading entries of each table whose blocks have left the window."""
    form: Form = Form.HOLES
    spare: dict[int, int] = field(default_factory=dict)
    """By group: a block that has left, and that its next tokens get. Others go to any text."""
    used: set[tuple[int, int]] = field(default_factory=set)
    """(Group, block) of all that the tables ever had."""
    num_turned: int = 0
    """Blocks that came back at a later place of the same table."""


class RingCache(RequestLoop):
    """A model over groups of layers. Every slot that no text owns is NaN."""

    def __init__(
        self,
        loaded: LoadedModel,
        form: Form = Form.HOLES,
        backend: AttentionBackend | None = None,
        num_blocks: int = 400,
        block_size: int = BLOCK_SIZE,
        by_window: bool = True,
    ) -> None:
        """backend: None: what a worker takes. by_window: False: one group, as if there were no windows."""
        self.form, self._size = form, block_size
        self.num_turned = 0
        """By the last texts: blocks that came back at a later place of the same table."""
        groups = [GroupPlan(0, None, 0, 0)]
        if by_window:
            groups = group_needs(loaded.runtime.layers, loaded.runtime.dtype)
        groups = [replace(group, num_blocks=num_blocks + 3 * group.index) for group in groups]
        encoder = loaded.encoder
        cross = None if encoder is None else CrossPlan(num_blocks, 0, encoder.max_tokens)
        self.plan = KVCachePlan(block_size, tuple(groups), cross=cross)
        self.runner = loaded.runner(self.plan, backend)
        self._kv: list[list[torch.Tensor]] = [[] for _ in self.plan.groups]
        for layer in self.runner.kv_cache.layers:
            if not layer.is_cross:
                self._kv[layer.group] += layer.k_cache, layer.v_cache
        self.runner.kv_cache.fill(NAN)
        self._free = [list(range(1, group.num_blocks)) for group in self.plan.groups]
        for number, free in enumerate(self._free):
            random.Random(number).shuffle(free)

    def forbid_the_null_block(self) -> None:
        """For a model that pads nothing: who reads a hole gets NaN."""
        for caches in self._kv:
            for cache in caches:
                cache[0] = NAN

    def text(self, prompt: Sequence[int], num_new: int = 0, form: Form | None = None) -> Text:
        """form: None: the cache's."""
        tables: tuple[list[int], ...] = tuple([] for _ in self.plan.groups)
        return Text(prompt, [], num_new, computed=0, tables=tables, num_gone=[0] * len(tables), form=form or self.form)

    def next_part(self, request: Text, chunk: int = NEVER) -> SequencePart:
        """Its blocks before their window are gone from now on."""
        start, known = request.computed, [*request.prompt, *request.token_ids]
        end = min(start + min(chunk, request.chunk), len(known))
        for group, table in zip(self.plan.groups, request.tables, strict=True):
            first = 0 if group.window is None else max(0, start + 1 - group.window) // self._size
            self._let_go(request, group.index, min(first, len(table)))
            while len(table) * self._size < end:
                block = request.spare.pop(group.index, 0) or self._free[group.index].pop()
                request.num_turned += (group.index, block) in request.used
                request.used.add((group.index, block))
                table.append(block)
        sampling = GREEDY if end == len(known) else None
        return SequencePart(known[start:end], start, request.tables, sampling, encoder=request.encoder_now())

    def _let_go(self, text: Text, group: int, first: int) -> None:
        """The blocks of the entries before `first` become NaN, and free."""
        table, gone = text.tables[group], text.num_gone[group]
        left = table[gone:first]
        for cache in self._kv[group]:
            cache[left] = NAN
        if text.form is Form.HOLES:
            table[gone:first] = [0] * len(left)
        text.num_gone[group] = max(gone, first)
        if left and group not in text.spare:
            text.spare[group] = left.pop()
        self._free[group] += left

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int, way: Way) -> list[list[SampledToken]]:
        """Greedy tokens after the prompts of a way. Texts take the forms of tables in turn."""
        runs = way.runs([self.text(prompt, num_new, form) for prompt, form in zip(prompts, cycle(Form), strict=False)])
        for together in runs:
            self.run(together)
        texts = [text for together in runs for text in together]
        self.num_turned = sum(text.num_turned for text in texts)
        return [text.sampled for text in texts]

    def logits(self, tokens: Sequence[int], cuts: Sequence[int], others: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        """[T, vocab_size] of a text, computed in chunks that end at the cuts and its end, each in a step with as many tokens of the
        other texts as they still have of the chunk's length."""
        own, rest, rows = self.text(tokens), [self.text(other) for other in others], []
        for end in [*cuts, len(tokens)]:
            length = end - own.computed
            running = [other for other in rest if other.computed < len(other.prompt)]
            texts = [*running[::2], own, *running[1::2]]
            parts = [self.next_part(text, length) for text in texts]
            for text, part in zip(texts, parts, strict=True):
                text.computed += len(part.token_ids)
            before = sum(len(part.token_ids) for part in parts[: len(running[::2])])
            rows.append(self.runner.logits(parts)[before : before + length])
        self.num_turned = own.num_turned
        return torch.cat(rows)
