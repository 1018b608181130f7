"""Translates the groups of a worker's KV cache from protobuf to core specs and back: a line for each kind. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.v1 import common_pb2

from .core.groups.dense import DenseSpec
from .core.groups.state import StateSpec
from .core.groups.unit import UnitSpec
from .core.groups.window import WindowSpec
from .core.messages import GroupSpec, Layout
from .core.refusal import Reason, Refusal, bad_field

TIER = common_pb2.TIER_DEVICE
"""The only tier of this version."""

KINDS: Mapping[str, type[GroupSpec]] = {
    "full_attention": DenseSpec,
    "sliding_window": WindowSpec,
    "state": StateSpec,
    "cross_attention": UnitSpec,
}
"""By field of `KVCacheGroup.spec`. What the message of a kind has as fields, its spec has as attributes."""


def check_tier(tier: common_pb2.Tier, field: str) -> None:
    """Raise Refusal (BAD_FIELD) if it is not the only tier."""
    if tier != TIER:
        name = common_pb2.Tier.Name(tier) if tier in common_pb2.Tier.values() else str(tier)
        raise bad_field(f"{field}.tier", f"this version has TIER_DEVICE only, got {name}")


def decode_config(config: common_pb2.KVCacheConfig) -> Layout:
    """Decode the layout of a KV cache. The core checks the sizes. Raises Refusal: BAD_FIELD, UNSUPPORTED."""
    specs = []
    if not config.groups:
        raise bad_field("kv_cache_config.groups", "needed at least one")
    if len(config.groups) != len(config.pools):
        raise bad_field(
            "kv_cache_config.pools",
            f"needed one for each group, got {len(config.pools)} for {len(config.groups)} groups",
        )
    for index, (group, pool) in enumerate(zip(config.groups, config.pools, strict=True)):
        for name, number in (("groups", group.group), ("pools", pool.group)):
            if number != index:
                raise bad_field(f"kv_cache_config.{name}[{index}].group", f"needed {index}, its place, got {number}")
        kind = group.WhichOneof("spec")
        if kind is None:
            field = f"kv_cache_config.groups[{index}]"
            served = " and ".join((", ".join([*KINDS][:-1]), [*KINDS][-1]))
            raise Refusal(Reason.UNSUPPORTED, f"{field}: {served} are served, got no spec", field=field)
        check_tier(pool.tier, f"kv_cache_config.pools[{index}]")
        stated = getattr(group, kind)
        sizes = {field.name: getattr(stated, field.name) for field in stated.DESCRIPTOR.fields}
        specs.append(KINDS[kind](pool.num_blocks, group.bytes_per_block, **sizes))
    return Layout(config.block_size, tuple(specs))


def encode_config(layout: Layout) -> common_pb2.KVCacheConfig:
    """Encode the layout that a worker has registered."""
    config = common_pb2.KVCacheConfig(block_size=layout.block_size)
    kinds = {spec: kind for kind, spec in KINDS.items()}
    for index, spec in enumerate(layout.groups):
        group = config.groups.add(group=index, bytes_per_block=spec.bytes_per_block)
        stated = getattr(group, kinds[type(spec)])
        stated.SetInParent()
        for field in stated.DESCRIPTOR.fields:
            setattr(stated, field.name, getattr(spec, field.name))
        config.pools.add(group=index, tier=TIER, num_blocks=spec.num_blocks)
    return config
