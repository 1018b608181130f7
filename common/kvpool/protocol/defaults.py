"""Fills unset fields of a request with the model's defaults. Clients do so, so that each attempt of a request asks for the same; a
worker fills in fields that are still unset."""

from __future__ import annotations

from kvpool.v1 import worker_pb2


def fill_in(
    request: worker_pb2.GenerateRequest, defaults: worker_pb2.GenerationDefaults, *, num_first: int, max_model_len: int
) -> None:
    """Set the unset fields of a valid request, which stays valid. `num_first`: tokens that the text begins with, without delivered
    ones."""
    explicit = worker_pb2.SamplingParams()
    explicit.CopyFrom(request.sampling)
    request.sampling.CopyFrom(defaults.sampling)
    # In place of the default, where a merge would join two lists.
    for entry, _ in explicit.ListFields():
        request.sampling.ClearField(entry.name)
    request.sampling.MergeFrom(explicit)
    _fill_in_beams(request, defaults, has_temperature=explicit.temperature > 0)
    _fill_in_lengths(request, defaults, num_first, max_model_len - num_first)


def _fill_in_beams(
    request: worker_pb2.GenerateRequest, defaults: worker_pb2.GenerationDefaults, *, has_temperature: bool
) -> None:
    search, usual = request.beam_search, defaults.beam_search
    if not search.num_beams and not has_temperature and not request.num_delivered_tokens:
        search.num_beams = usual.num_beams if max(1, request.n) <= usual.num_beams else 0
    if search.num_beams < 2:
        return
    request.sampling.temperature = 0  # beams are not drawn; one of the request itself was refused
    if usual.HasField("length_penalty") and not search.HasField("length_penalty"):
        search.length_penalty = usual.length_penalty
    if usual.HasField("early_stopping") and not search.HasField("early_stopping"):
        search.early_stopping = usual.early_stopping


def _fill_in_lengths(
    request: worker_pb2.GenerateRequest, defaults: worker_pb2.GenerationDefaults, num_first: int, room: int
) -> None:
    stop, usual, num_delivered = request.stop, defaults.stop, request.num_delivered_tokens
    if not stop.HasField("max_tokens"):
        most = usual.max_tokens or max(0, defaults.max_length - num_first)
        # Where there is no room for the default, its end is that of the room.
        stop.max_tokens = max(1, most - num_delivered) if 0 < most < room else 0
    if not stop.HasField("min_tokens"):
        least = usual.min_tokens if usual.HasField("min_tokens") else max(0, defaults.min_length - num_first)
        stop.min_tokens = min(least, num_delivered + stop.max_tokens) if stop.max_tokens else least
    if not stop.stop_strings:
        stop.stop_strings.extend(usual.stop_strings)
