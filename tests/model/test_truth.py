"""Paged computation in float32 equals transformers' generate, token by token: each kind of KV, computed in each way.

A new kind adds its subjects, not tests. What only one kind has is in test_kinds_of_kv.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.model.paged import NEVER
from tests.model.truth import dense, encoders, states, windows
from tests.model.truth.subject import Models, SharingSubject, Subject, Way

SHARING = [*dense.subjects(), *states.subjects(), *encoders.subjects()]
"""Each with its own marks, pytest.mark.gpu among them."""
ALL = [*SHARING, *windows.subjects()]
WAYS = [Way((NEVER, 7), texts=(1, 2)), Way((1, NEVER, 16, 7))]
"""Alone, whole and in chunks shorter than a window, of which only the last samples; all together, token by token, whole, and in
chunks longer and shorter than a window, which are next to texts that decode."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, models: Models) -> Subject:
    make, *arguments = request.param
    made: Subject = make(*arguments, models)
    return made


of_each = pytest.mark.parametrize("subject", ALL, indirect=True, scope="module")
of_each_that_shares = pytest.mark.parametrize("subject", SHARING, indirect=True, scope="module")


@of_each
def test_equality_proves_something(subject: Subject) -> None:
    subject.prove()


@of_each
@pytest.mark.parametrize("way", WAYS, ids=["alone", "together"])
def test_texts_are_those_of_generate(subject: Subject, way: Way) -> None:
    truths = subject.truths if way.texts is None else [subject.truths[index] for index in way.texts]
    subject.check(subject.compute(way), truths)


@of_each_that_shares
def test_texts_that_hit_are_those_of_generate_and_what_they_hit_is_never_written(subject: SharingSubject) -> None:
    """One reads it by itself, the others join, and it is attended once for all of them."""
    hit = subject.hit()
    subject.check(hit.texts, hit.truths)
    for before, after in zip(hit.before, hit.after, strict=True):
        assert torch.equal(before.nan_to_num(), after.nan_to_num())  # slots that nobody has written are NaN


@of_each_that_shares
def test_the_cache_is_what_is_read(subject: SharingSubject) -> None:
    """Other content gives another result: nothing that was hit is computed again."""
    hit = subject.hit(spoils=True)
    found, computed = hit.texts[0][0].logprobs, torch.log_softmax(hit.truths[0].logits[0], dim=-1).max()
    assert found is not None
    assert abs(found.logprob - float(computed)) > 10 * subject.tolerance
