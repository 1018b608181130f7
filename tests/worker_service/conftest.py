"""What several tests of a worker share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvpool.worker_service.cache import engine_cache, link_state

if TYPE_CHECKING:  # most tests here need no torch, which takes seconds to import
    from tests.cluster.in_process import InProcessCluster
    from tests.tiny_models import TinyModel


@pytest.fixture
def brief_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was lost is sent again after a tenth of the usual time: where many are lost, waiting is all that takes long."""
    monkeypatch.setattr(link_state, "BACKOFF_FIRST_SECONDS", link_state.BACKOFF_FIRST_SECONDS / 10)
    for module in (link_state, engine_cache):
        monkeypatch.setattr(module, "BACKOFF_MOST_SECONDS", module.BACKOFF_MOST_SECONDS / 10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """No token of it ends a text."""
    from tests.cluster.models import make_endless_model

    return make_endless_model(tmp_path_factory.mktemp("model") / "endless", tokenizer=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    model: TinyModel, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[InProcessCluster]:
    """A manager and a worker for a module, with its SETTINGS."""
    from tests.cluster.cluster import TAKES_TIME
    from tests.cluster.in_process import in_process_cluster

    settings = {**TAKES_TIME, **request.module.SETTINGS}
    async with in_process_cluster(model.path, tmp_path_factory.mktemp("cluster"), **settings) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: InProcessCluster) -> AsyncIterator[InProcessCluster]:
    """After each test all blocks are back and every law holds."""
    shared.worker.engine.stats.ended.clear()
    yield shared
    await shared.until_idle()
    assert shared.manager.manager.check().violations == []
