"""The cluster that the tests of `kvpool bench serve` share: two tiny models behind one manager."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.cluster.cluster import Cluster
from tests.cluster.models import make_endless_model
from tests.tiny_models import make_tiny_model


@dataclass(frozen=True)
class TinyCluster:
    """One manager and two workers of block size 4, each with a model of its own, in float32."""

    cluster: Cluster

    ROOMY: ClassVar = "roomy"
    """A llama with a tokenizer of one token per character, over 1,024 blocks."""
    SMALL: ClassVar = "small"
    """Another model, over 3 blocks: what is to be measured has to be named."""


@asynccontextmanager
async def start_tiny_cluster(folder: Path) -> AsyncIterator[TinyCluster]:
    """Start it, and stop it in the end, when every law must hold."""
    roomy, small = TinyCluster.ROOMY, TinyCluster.SMALL
    models = {
        roomy: make_endless_model(folder / roomy, tokenizer=True),
        small: make_tiny_model("olmo2", folder / small),
    }
    sizes = {roomy: 1025, small: 4}
    async with Cluster(folder) as cluster:
        await cluster.start(
            {name: {"model": models[name].path, "block_size": 4, "num_blocks": size} for name, size in sizes.items()}
        )
        yield TinyCluster(cluster)
        await cluster.until_clean()
