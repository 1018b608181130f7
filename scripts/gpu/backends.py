"""Every attention backend with a tiny model: its self-test, then the model's text."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM

from kvpool.worker_service.attention.layer import AttentionBackend, AttentionSpec
from kvpool.worker_service.attention.selection import CANDIDATES, BackendName
from kvpool.worker_service.attention.verification import run_self_test
from kvpool.worker_service.model.device import enter_device
from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.load import LoadedModel, load_model
from kvpool.worker_service.model.settings import DTypeName, ModelSettings
from kvpool.worker_service.step import SequencePart
from tests.model.paged import NEVER, PagedModel, quiet
from tests.tiny_models import MIN_MARGIN, Oracle, TinyModel, make_tiny_model

from .cases import AddRow, attempt
from .results import Outcome, Row
from .setup import Setup

_BACKENDS: Final[tuple[BackendName, ...]] = ("torch", *(candidate.name for candidate in CANDIDATES))  # type: ignore[arg-type]
_NUM_BLOCKS: Final = 256
TOLERANCE: Final = 1e-3
"""Of log-probabilities in float32; the distance of the prompts' best tokens is larger."""
_FACTOR, _ALLOWANCE = 2.0, 0.02
"""In narrow formats: allowed error against float32, as a factor on that of transformers' eager attention in the same format, plus a
constant."""

_Truth = list[tuple[list[int], torch.Tensor]]
"""Per prompt: greedy tokens, and the logits [num_tokens, vocab_size] that they were chosen from."""


def try_backends(
    setup: Setup, add_row: AddRow, architecture: str, dtype: DTypeName, block_sizes: tuple[int, ...]
) -> None:
    """A row for each backend and block size. A row is refused if the worker refuses the backend; plain torch must not be."""
    with tempfile.TemporaryDirectory(dir=setup.folder) as folder:
        _try_backends(setup, add_row, make_tiny_model(architecture, Path(folder)), dtype, block_sizes)


def _try_backends(
    setup: Setup, add_row: AddRow, tiny: TinyModel, dtype: DTypeName, block_sizes: tuple[int, ...]
) -> None:
    device = torch.device(setup.device)
    enter_device(device)
    torch.set_num_threads(1)
    settings = ModelSettings(
        str(tiny.path), dtype=dtype, device=setup.device, cache_dir=tiny.path / "cache", runtime="torch"
    )
    loaded = load_model(settings, quiet)
    truth = [Oracle.of(tiny.path).logits(prompt, tiny.num_new_tokens) for prompt in tiny.prompts]
    allowed = 0.0 if loaded.runtime.dtype == torch.float32 else _eager_error(tiny, truth, loaded)
    for name in _BACKENDS:
        for block_size in block_sizes:
            row_name = f"{tiny.architecture} {dtype} {name} block {block_size}"
            try:
                backend = loaded.attention_backend(name, block_size, quiet)
            except ModelError as refusal:
                add_row(Row(row_name, Outcome.FAILED if name == "torch" else Outcome.REFUSED, _reason(refusal)))
                continue
            assert backend is not None

            def work(backend: AttentionBackend = backend, block_size: int = block_size, name: str = row_name) -> Row:
                needs = loaded.runtime.attention_needs
                run_self_test(backend, AttentionSpec(needs, loaded.runtime.dtype, device, block_size))
                paged = PagedModel(loaded, _NUM_BLOCKS, backend=backend, block_size=block_size)
                try:
                    if loaded.runtime.dtype == torch.float32:
                        return Row(name, figures={"logprob_difference": _compare_text(paged, tiny, truth)})
                    error = _median_error(paged, tiny, truth, block_size)
                finally:
                    paged.runner.close()
                figures = {"median_error": error, "median_error_of_eager": allowed}
                if not error <= _FACTOR * allowed + _ALLOWANCE:
                    return Row(
                        name,
                        Outcome.FAILED,
                        f"log-probabilities are off by {error:.3g}, eager's by {allowed:.3g}",
                        figures,
                    )
                return Row(name, figures=figures)

            attempt(add_row, row_name, work)


def _reason(refusal: ModelError) -> str:
    """The reason without details of the row."""
    return str(refusal).partition(". Give --attention-backend")[0]


def _compare_text(paged: PagedModel, tiny: TinyModel, truth: _Truth) -> float:
    """Assert that greedy texts of all prompts, at once and in chunks, equal generate's; returns the largest difference of
    log-probabilities."""
    largest = 0.0
    for chunk, stagger in ((NEVER, 0), (7, 2)):
        requests = [paged.request(prompt, tiny.num_new_tokens) for prompt in tiny.prompts]
        paged.run(requests, chunk, stagger)
        for request, (tokens, logits) in zip(requests, truth, strict=True):
            best = logits.topk(2, dim=-1).values
            assert float((best[:, 0] - best[:, 1]).min()) >= MIN_MARGIN, (
                "the oracle's best tokens are too close, so equality proves nothing"
            )
            assert request.token_ids == tokens, f"tokens {request.token_ids}, generate has {tokens}"
            expected = torch.log_softmax(logits, dim=-1).max(dim=-1).values
            difference = float((torch.tensor(request.logprobs) - expected).abs().max())
            assert difference <= TOLERANCE, f"log-probabilities differ by {difference:.3g}"
            largest = max(largest, difference)
    return largest


def _median_error(paged: PagedModel, tiny: TinyModel, truth: _Truth, block_size: int) -> float:
    """Median error of the log-probabilities of generate's tokens, which are forced: first the prompt, then the tokens."""
    errors = []
    for prompt, (tokens, logits) in zip(tiny.prompts, truth, strict=True):
        table = paged.request(prompt, len(tokens)).table
        first = paged.runner.logits([SequencePart(list(prompt), 0, (table,), None)])[-1:]
        rest = paged.runner.logits([SequencePart(tokens[:-1], len(prompt), (table,), None)])
        errors += _errors(torch.cat([first, rest]), tokens, logits)
    return statistics.median(errors)


def _eager_error(tiny: TinyModel, truth: _Truth, loaded: LoadedModel) -> float:
    """The same for transformers' eager attention, in the format of the loaded model."""
    model = AutoModelForCausalLM.from_pretrained(
        tiny.path, dtype=loaded.runtime.dtype, attn_implementation="eager", device_map={"": loaded.runtime.device}
    ).eval()
    errors = []
    for prompt, (tokens, logits) in zip(tiny.prompts, truth, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *tokens[:-1]]], device=loaded.runtime.device)
            ours = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        errors += _errors(ours, tokens, logits)
    return statistics.median(errors)


def _errors(logits: torch.Tensor, tokens: list[int], truth: torch.Tensor) -> list[float]:
    """Errors of the tokens' log-probabilities. Raises AssertionError if one is not finite."""
    chosen = torch.tensor(tokens)[:, None]
    ours, right = (torch.log_softmax(rows.float().cpu(), dim=-1).gather(1, chosen)[:, 0] for rows in (logits, truth))
    assert ours.isfinite().all(), "logits are not finite"
    found: list[float] = (ours - right).abs().tolist()
    return found
