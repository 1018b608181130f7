from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier

class Root(_message.Message):
    __slots__ = ("model_fingerprint", "adapter", "tenant_salt", "input_digest")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    INPUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    adapter: str
    tenant_salt: str
    input_digest: bytes
    def __init__(self, model_fingerprint: _Optional[str] = ..., adapter: _Optional[str] = ..., tenant_salt: _Optional[str] = ..., input_digest: _Optional[bytes] = ...) -> None: ...

class SequenceKey(_message.Message):
    __slots__ = ("sequence_id", "attempt", "round")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    attempt: int
    round: int
    def __init__(self, sequence_id: _Optional[str] = ..., attempt: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class FullAttentionSpec(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SlidingWindowSpec(_message.Message):
    __slots__ = ("window_tokens", "ring_blocks")
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    window_tokens: int
    ring_blocks: int
    def __init__(self, window_tokens: _Optional[int] = ..., ring_blocks: _Optional[int] = ...) -> None: ...

class StateSpec(_message.Message):
    __slots__ = ("grid_tokens", "scratch_blocks")
    GRID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    grid_tokens: int
    scratch_blocks: int
    def __init__(self, grid_tokens: _Optional[int] = ..., scratch_blocks: _Optional[int] = ...) -> None: ...

class CrossAttentionSpec(_message.Message):
    __slots__ = ("max_encoder_tokens",)
    MAX_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_encoder_tokens: int
    def __init__(self, max_encoder_tokens: _Optional[int] = ...) -> None: ...

class KVCacheGroup(_message.Message):
    __slots__ = ("group", "full_attention", "sliding_window", "cross_attention", "state", "bytes_per_block")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FULL_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    CROSS_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    group: int
    full_attention: FullAttentionSpec
    sliding_window: SlidingWindowSpec
    cross_attention: CrossAttentionSpec
    state: StateSpec
    bytes_per_block: int
    def __init__(self, group: _Optional[int] = ..., full_attention: _Optional[_Union[FullAttentionSpec, _Mapping]] = ..., sliding_window: _Optional[_Union[SlidingWindowSpec, _Mapping]] = ..., cross_attention: _Optional[_Union[CrossAttentionSpec, _Mapping]] = ..., state: _Optional[_Union[StateSpec, _Mapping]] = ..., bytes_per_block: _Optional[int] = ...) -> None: ...

class KVCachePool(_message.Message):
    __slots__ = ("group", "tier", "num_blocks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group: int
    tier: Tier
    num_blocks: int
    def __init__(self, group: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class KVCacheConfig(_message.Message):
    __slots__ = ("block_size", "groups", "pools")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    groups: _containers.RepeatedCompositeFieldContainer[KVCacheGroup]
    pools: _containers.RepeatedCompositeFieldContainer[KVCachePool]
    def __init__(self, block_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KVCacheGroup, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[KVCachePool, _Mapping]]] = ...) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("group", "tier", "start_index", "block_ids", "generations")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    START_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    group: int
    tier: Tier
    start_index: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., start_index: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("group", "tier", "capacity", "free", "cached", "held", "reserved", "copying", "shared", "withheld")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    COPYING_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    group: int
    tier: Tier
    capacity: int
    free: int
    cached: int
    held: int
    reserved: int
    copying: int
    shared: int
    withheld: int
    def __init__(self, group: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., capacity: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., reserved: _Optional[int] = ..., copying: _Optional[int] = ..., shared: _Optional[int] = ..., withheld: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_uncomputed_tokens")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_uncomputed_tokens: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_uncomputed_tokens: _Optional[int] = ...) -> None: ...
