"""The states that the parts of a step name, checked before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

from ...attention.layout import PackingError
from ...engine.step import SequencePart, StateBlocks


def states_of(parts: Sequence[SequencePart], num_blocks: int) -> list[StateBlocks]:
    """The state of each part; none if the model has no recurrent layers: num_blocks is 0.

    Raises PackingError if a part has none where the model has some, if a block is not one of 1 … num_blocks − 1, if a text does not
    begin with the initial state and go on from another, or if a block that is written is named by another part or twice by one.
    """
    if not num_blocks:
        return []
    states: list[StateBlocks] = []
    owners: dict[int, int] = {}
    for index, part in enumerate(parts):
        state = part.state
        if state is None:
            raise PackingError(f"part {index} has no state, the model has recurrent layers")
        if (part.start == 0) != (state.source == 0):
            raise PackingError(
                f"part {index} from position {part.start} goes on from the state in block {state.source}"
            )
        written = [state.running, *([state.snapshot] if state.snapshot else [])]
        if not all(0 < block < num_blocks for block in written) or not 0 <= state.source < num_blocks:
            raise PackingError(f"part {index} has a state outside 1 … {num_blocks - 1}: {state}")
        for block in written:
            if owners.setdefault(block, index) != index or written.count(block) > 1:
                raise PackingError(f"the state in block {block} is written twice")
        states.append(state)
    for index, state in enumerate(states):
        if owners.get(state.source, index) != index or state.source == state.snapshot != 0:
            raise PackingError(
                f"part {index} goes on from the state in block {state.source}, which the step overwrites"
            )
    return states
