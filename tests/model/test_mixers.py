"""Recurrent layers are found by what they ask of the cache, bound, and given back as they were."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from kvpool.worker_service.attention.interface import ATTENTION_NAME, register, target_of
from kvpool.worker_service.model.errors import UnsupportedModel
from kvpool.worker_service.model.forward import mixers as finding
from kvpool.worker_service.model.forward.kv_cache import KVCache
from kvpool.worker_service.model.forward.kv_plan import KVCachePlan, StatesPlan
from kvpool.worker_service.model.forward.layers import find_attention_layers
from kvpool.worker_service.model.forward.mixer import MixerCall, MixerForward, MixerPiece, MixerState, state_bytes
from kvpool.worker_service.model.forward.mixer_binding import MixerBinding, lay_out
from kvpool.worker_service.model.forward.mixers import find_mixers
from kvpool.worker_service.model.guard.support import check_layers, check_replica, guarded
from kvpool.worker_service.step import StateBlocks
from tests.tiny_models import build_model

CPU = torch.device("cpu")
MAX_MODEL_LEN = 64


def model_of(architecture: str) -> Any:
    register()
    model = build_model(architecture, 0)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval()


def check(model: Any) -> None:
    guarded(model, model.config, torch.float32, CPU, MAX_MODEL_LEN, is_thorough=True)


def hooks_of(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_each_recurrent_layer_is_found_with_its_states() -> None:
    (conv,) = find_mixers(model_of("lfm2"), CPU)
    assert (conv.name, conv.layer_idx) == ("model.layers.0.conv", 0)
    assert conv.states == (MixerState("conv", 0, (32, 3), torch.float32),)
    assert conv.by_token == {"hidden_states"}
    (mamba,) = find_mixers(model_of("jamba"), CPU)
    assert [(spec.kind, spec.shape) for spec in mamba.states] == [("conv", (64, 4)), ("recurrent", (64, 8))]
    assert find_mixers(model_of("llama"), CPU) == []


def test_recurrent_states_stay_float32_in_a_smaller_dtype() -> None:
    found = find_mixers(model_of("qwen3_next").to(torch.bfloat16), CPU)
    dtypes = {(spec.kind, spec.dtype) for mixer in found for spec in mixer.states}
    assert dtypes == {("conv", torch.bfloat16), ("recurrent", torch.float32)}
    assert state_bytes(found) == state_bytes(found, torch.bfloat16)
    assert state_bytes(found, torch.float32) > state_bytes(found)


@pytest.mark.parametrize(
    ("kind", "fields"), [("nemotron_h", {}), ("zamba2", {}), ("mamba2", {"time_step_limit": (0.01, 0.05)})]
)
def test_a_single_token_has_the_time_step_of_several(
    kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers clamps it where several are computed. A text would depend on where it is cut; the check sees it."""
    large = AutoConfig.for_model(kind, **fields)
    check_replica(large, 4096)
    monkeypatch.setattr(finding, "clamp_time_steps", lambda model: None)
    with pytest.raises(UnsupportedModel, match="computes other logits over paged KV"):
        check_replica(large, 4096)


def test_after_the_search_nothing_is_left_on_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("lfm2")
    before = hooks_of(model)
    find_mixers(model, CPU)
    monkeypatch.setattr(Lfm2ShortConv, "forward", broken)
    with pytest.raises(ZeroDivisionError):
        find_mixers(model, CPU)
    assert hooks_of(model) == before
    assert all(target_of(module) is None for module in model.modules())


def broken(self: Any, hidden_states: torch.Tensor, past_key_values: Any = None, **_: Any) -> torch.Tensor:
    past_key_values.get_conv_state(self.layer_idx)
    raise ZeroDivisionError


def test_a_module_without_a_parameter_for_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Lfm2ShortConv.forward

    def hidden(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = forward(self, hidden_states, **kwargs)
        return output

    monkeypatch.setattr(Lfm2ShortConv, "forward", hidden)
    with pytest.raises(UnsupportedModel, match="has a state, but no parameter for a cache"):
        find_mixers(model_of("lfm2"), CPU)


def test_a_bound_module_is_given_back_as_it_was() -> None:
    """Also one whose forward had been replaced, bound twice, and released twice."""
    model = model_of("lfm2")
    found = find_mixers(model, CPU)
    module = found[0].module
    plan = KVCachePlan.one_group(4, 4, 0, StatesPlan(3, 0))
    states = KVCache(plan, [], torch.float32, CPU, found).states
    for replaced in (None, lambda *_, **__: None):
        if replaced is not None:
            module.forward = replaced
        before = module.__dict__.get("forward")
        first, second = MixerBinding(found, states), MixerBinding(found, states)
        assert module.__dict__["forward"] is not before
        second.release()
        first.release()
        assert module.__dict__.get("forward") is before


def test_pieces_are_single_tokens_together_and_each_chunk_by_itself() -> None:
    blocks = [StateBlocks(1, 1), StateBlocks(0, 2, 8), StateBlocks(3, 4, 9), StateBlocks(0, 5), StateBlocks(6, 7)]
    step = lay_out([0, 1, 4, 5, 6], [1, 3, 1, 1, 2], blocks, CPU)
    kinds = [(piece.num_sequences, piece.num_tokens) for piece in step.pieces]
    assert kinds == [(2, 1), (1, 1), (1, 3), (1, 2)]
    sources = [None if piece.sources is None else piece.sources.tolist() for piece in step.pieces]
    assert sources == [[1, 3], None, None, [6]]
    assert [piece.rows if isinstance(piece.rows, slice) else piece.rows.tolist() for piece in step.pieces] == [
        [0, 4],
        [5],
        slice(1, 4),
        slice(6, 8),
    ]
    assert step.running.tolist() == [1, 4, 5, 2, 7]
    assert step.snapshots is not None
    assert step.snapshots.blocks.tolist() == [9, 8]
    assert step.snapshots.sources.tolist() == [1, 3]
    assert step.snapshots.last_rows.tolist() == [4, 3]


@pytest.mark.parametrize("architecture", ["jamba", "mamba"])
def test_a_scan_from_a_state_equals_token_by_token(architecture: str) -> None:
    model = model_of(architecture)
    mixer = find_mixers(model, CPU)[0]
    assert mixer.forgets
    assert mixer.scan is not None
    hidden = torch.randn(1, 200, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        results = []
        for one in (mixer, mixer._replace(scan=None)):
            call = MixerCall(one, MixerForward.of(one), (), {"hidden_states": hidden})
            _, before = call.run(MixerPiece.of_one(0, 40), None)
            results.append(call.run(MixerPiece.of_one(40, 200), before))
    for ours, expected in zip(*((output, *states) for output, states in results), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("returns_two", [True, False])
def test_a_scan_that_does_not_go_on_as_single_tokens_do_is_not_used(
    returns_two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of that name may be another one: then tokens go one by one."""
    module = inspect.unwrap(JambaMambaMixer.forward).__globals__
    scan = module["mamba_selective_scan"]

    def of_another_kind(*args: Any, **kwargs: Any) -> Any:
        output, last = scan(*args, **kwargs)
        # transformers gives five arguments by position.
        return (output, last * last) if returns_two or len(args) == 5 else output

    monkeypatch.setitem(module, "mamba_selective_scan", of_another_kind)
    (mixer,) = find_mixers(model_of("jamba"), CPU)
    assert mixer.is_serial


def test_transformers_own_scan_is_left_as_it_is() -> None:
    module = inspect.unwrap(JambaMambaMixer.forward).__globals__
    before = module["mamba_selective_scan"]
    model = model_of("jamba")
    check(model)
    assert module["mamba_selective_scan"] is before
    assert all("forward" not in layer.__dict__ or hasattr(layer.forward, "__wrapped__") for layer in model.modules())


_jamba: Callable[..., torch.Tensor] = JambaMambaMixer.forward


def reads_nothing(self: Any, hidden_states: torch.Tensor, cache_params: Any = None, **kwargs: Any) -> torch.Tensor:
    """Uses the state when the text begins only."""
    if cache_params is not None and cache_params.has_previous_state(self.layer_idx):
        cache_params.reset()
    return _jamba(self, hidden_states, cache_params, **kwargs)


def remembers_itself(self: Any, hidden_states: torch.Tensor, cache_params: Any = None, **kwargs: Any) -> torch.Tensor:
    """Keeps something else on the module."""
    mean = getattr(self, "mean", 0.0)
    self.mean = hidden_states[:, -1:].mean()
    return _jamba(self, hidden_states, cache_params, **kwargs) + 0.1 * mean


def mixes_the_batch(self: Any, hidden_states: torch.Tensor, cache_params: Any = None, **kwargs: Any) -> torch.Tensor:
    """Of several sequences each hears of the others."""
    return _jamba(self, hidden_states, cache_params, **kwargs) + 0.1 * (hidden_states - hidden_states.mean(0))


@pytest.mark.parametrize("mistake", [reads_nothing, remembers_itself, mixes_the_batch, None])
def test_a_mixer_that_goes_its_own_way_is_refused(
    mistake: Callable[..., torch.Tensor] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("jamba")
    if mistake is None:
        check(model)
        monkeypatch.setattr(finding, "_forgets", lambda *_: False)
    else:
        monkeypatch.setattr(JambaMambaMixer, "forward", mistake)
    with pytest.raises(UnsupportedModel, match="computes other logits over paged KV"):
        check(model)


def test_a_snapshot_that_is_written_to_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the running state were not the only block that a step writes."""
    model = model_of("lfm2")
    run = MixerBinding.begin

    def begin(self: MixerBinding, step: Any) -> None:
        sources = [piece.sources for piece in step.pieces if piece.sources is not None]
        run(self, step)
        for bound in self._bound:
            for tensor in bound._tensors:
                for blocks in sources:
                    tensor[blocks] *= 1 + 1e-6

    monkeypatch.setattr(MixerBinding, "begin", begin)
    with pytest.raises(UnsupportedModel, match="changes a state that others go on from"):
        check(model)


def test_a_layer_with_a_state_that_is_nowhere_in_the_cache_is_refused() -> None:
    model = model_of("lfm2")
    layers = find_attention_layers(model, CPU)
    check_layers(model.config, layers, MAX_MODEL_LEN, find_mixers(model, CPU))
    with pytest.raises(UnsupportedModel, match="1 layers with a state, but 1 of them do not keep it"):
        check_layers(model.config, layers, MAX_MODEL_LEN)
