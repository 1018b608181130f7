"""Positions for decoders of encoder-decoder models.

Most of them take no position ids: they count the places of a row, which in a packed row are not those of a text. What such a
decoder adds for the positions is found by behaviour. The modules whose output for a row is the same for any tokens, learned or
computed positions, are called once on a row as long as the longest text. From then on they look up the rows of that output for
the positions that are given, whatever they are called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class GivenPositions:
    """The positions of the row that is being computed; outside `at` modules compute their own, as transformers does."""

    def __init__(self) -> None:
        self.ids: torch.Tensor | None = None
        """[T] int64; None: outside `at`."""

    @contextmanager
    def at(self, position_ids: torch.Tensor) -> Iterator[None]:
        """Give these positions inside. position_ids: [1, T] int64."""
        self.ids = position_ids[0]
        try:
            yield
        finally:
            self.ids = None

    def pass_to(self, modules: Sequence[torch.nn.Module]) -> None:
        """Give the positions, within `at`, to modules that take position_ids."""

        def hook(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return None if self.ids is None else (args, {**kwargs, "position_ids": self.ids[None]})

        for module in modules:
            module.register_forward_pre_hook(hook, with_kwargs=True)

    def install(self, found: Sequence[PositionTable]) -> None:
        """Make the modules look positions up, within `at`."""
        for module, table, has_batch in found:
            module.forward = self._looking_up(module.forward, table[None] if has_batch else table)

    def _looking_up(self, forward: Callable[..., Any], table: torch.Tensor) -> Callable[..., Any]:
        def look_up(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if self.ids is None else table[..., self.ids, :]

        return look_up


class PositionTable(NamedTuple):
    """A module whose output depends on positions alone."""

    module: Any
    table: torch.Tensor
    """[max_model_len, size]: its output at each position."""
    has_batch: bool
    """Whether its output for a row is [1, T, size], not [T, size]."""


class _Enough(Exception):
    """Ends a forward pass once all tables are complete: the rest of it is of no use."""


def find_position_tables(
    modules: Mapping[str, torch.nn.Module],
    run: Callable[[torch.Tensor], object],
    texts: tuple[torch.Tensor, torch.Tensor],
    max_model_len: int,
) -> list[PositionTable]:
    """The modules, among those given by name, that return the same for both texts.

    run: computes a row of token ids [1, T]; its attention must return what depends on the queries. texts: two rows of one
    length that differ everywhere.
    """
    first, second = (_outputs(modules, run, text) for text in texts)
    same = {name: output for name, output in first.items() if name in second and torch.equal(output, second[name])}
    outermost = [name for name in same if not any(name.startswith(f"{other}.") for other in same if other != name)]
    if not outermost:
        return []
    repeats = -(-max_model_len // texts[0].shape[1])
    row = texts[0].repeat(1, repeats)[:, :max_model_len]
    tables = _outputs({name: modules[name] for name in outermost}, run, row, stops=True)
    return [
        PositionTable(modules[name], table.reshape(-1, table.shape[-1]), same[name].dim() == 3)
        for name, table in tables.items()
    ]


def _outputs(
    modules: Mapping[str, torch.nn.Module],
    run: Callable[[torch.Tensor], object],
    row: torch.Tensor,
    stops: bool = False,
) -> dict[str, torch.Tensor]:
    """What the modules that are called once return, if it is one row of numbers for each token: [T, size] or [1, T, size].

    stops: whether to stop once all of the modules have returned.
    """
    outputs: dict[str, torch.Tensor | None] = {}

    def note(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def hook(_: torch.nn.Module, __: Any, output: Any) -> None:
            outputs[name] = output if name not in outputs and _is_row(output, row.shape[1]) else None
            if stops and len(outputs) == len(modules):
                raise _Enough

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in modules.items()]
    try:
        run(row)
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return {name: output.clone() for name, output in outputs.items() if output is not None}


def _is_row(output: Any, num_tokens: int) -> bool:
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.dim() not in (2, 3):
        return False
    return output.shape[-2] == num_tokens and output.numel() == num_tokens * output.shape[-1]
