from google.rpc import status_pb2 as _status_pb2
from kvpool.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_FREE: _ClassVar[BlockState]
    BLOCK_STATE_CACHED: _ClassVar[BlockState]
    BLOCK_STATE_HELD: _ClassVar[BlockState]
    BLOCK_STATE_RESERVED: _ClassVar[BlockState]
    BLOCK_STATE_COPYING: _ClassVar[BlockState]

class MissCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_CAUSE_UNSPECIFIED: _ClassVar[MissCause]
    MISS_CAUSE_NEVER_SEEN: _ClassVar[MissCause]
    MISS_CAUSE_EVICTED: _ClassVar[MissCause]
    MISS_CAUSE_OTHER_ROOT: _ClassVar[MissCause]
    MISS_CAUSE_BEING_COMPUTED: _ClassVar[MissCause]
    MISS_CAUSE_PARTIAL_TAIL: _ClassVar[MissCause]
    MISS_CAUSE_LAST_TOKEN: _ClassVar[MissCause]
    MISS_CAUSE_ON_ANOTHER_WORKER: _ClassVar[MissCause]
    MISS_CAUSE_WINDOW_NOT_KEPT: _ClassVar[MissCause]
    MISS_CAUSE_SNAPSHOT_NOT_KEPT: _ClassVar[MissCause]
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_FREE: BlockState
BLOCK_STATE_CACHED: BlockState
BLOCK_STATE_HELD: BlockState
BLOCK_STATE_RESERVED: BlockState
BLOCK_STATE_COPYING: BlockState
MISS_CAUSE_UNSPECIFIED: MissCause
MISS_CAUSE_NEVER_SEEN: MissCause
MISS_CAUSE_EVICTED: MissCause
MISS_CAUSE_OTHER_ROOT: MissCause
MISS_CAUSE_BEING_COMPUTED: MissCause
MISS_CAUSE_PARTIAL_TAIL: MissCause
MISS_CAUSE_LAST_TOKEN: MissCause
MISS_CAUSE_ON_ANOTHER_WORKER: MissCause
MISS_CAUSE_WINDOW_NOT_KEPT: MissCause
MISS_CAUSE_SNAPSHOT_NOT_KEPT: MissCause

class Uplink(_message.Message):
    __slots__ = ("session", "call_no", "downlink_ack", "reserve_wishes", "returned", "session_key")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CALL_NO_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_ACK_FIELD_NUMBER: _ClassVar[int]
    RESERVE_WISHES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    session: int
    call_no: int
    downlink_ack: int
    reserve_wishes: _containers.RepeatedCompositeFieldContainer[ReserveWish]
    returned: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    session_key: bytes
    def __init__(self, session: _Optional[int] = ..., call_no: _Optional[int] = ..., downlink_ack: _Optional[int] = ..., reserve_wishes: _Optional[_Iterable[_Union[ReserveWish, _Mapping]]] = ..., returned: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., session_key: _Optional[bytes] = ...) -> None: ...

class ReserveWish(_message.Message):
    __slots__ = ("group", "tier", "num_blocks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group: int
    tier: _common_pb2.Tier
    num_blocks: int
    def __init__(self, group: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Downlink(_message.Message):
    __slots__ = ("entries", "counts")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[DownlinkEntry]
    counts: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockCounts]
    def __init__(self, entries: _Optional[_Iterable[_Union[DownlinkEntry, _Mapping]]] = ..., counts: _Optional[_Iterable[_Union[_common_pb2.BlockCounts, _Mapping]]] = ...) -> None: ...

class DownlinkEntry(_message.Message):
    __slots__ = ("number", "grant", "stop", "drain", "boundary")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    number: int
    grant: _common_pb2.BlockRun
    stop: _common_pb2.SequenceKey
    drain: DrainOrder
    boundary: BoundaryOrder
    def __init__(self, number: _Optional[int] = ..., grant: _Optional[_Union[_common_pb2.BlockRun, _Mapping]] = ..., stop: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., drain: _Optional[_Union[DrainOrder, _Mapping]] = ..., boundary: _Optional[_Union[BoundaryOrder, _Mapping]] = ...) -> None: ...

class BoundaryOrder(_message.Message):
    __slots__ = ("key", "num_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SequenceKey
    num_tokens: int
    def __init__(self, key: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class DrainOrder(_message.Message):
    __slots__ = ("grace_ms",)
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    def __init__(self, grace_ms: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "register_no", "highest_epoch_seen", "address", "model_name", "model_fingerprint", "kv_cache_config", "holds_state", "max_model_len", "engine", "last_session", "process_key", "predecessor_key", "facts_digest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REGISTER_NO_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    HOLDS_STATE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LAST_SESSION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_KEY_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_KEY_FIELD_NUMBER: _ClassVar[int]
    FACTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    register_no: int
    highest_epoch_seen: int
    address: str
    model_name: str
    model_fingerprint: str
    kv_cache_config: _common_pb2.KVCacheConfig
    holds_state: bool
    max_model_len: int
    engine: str
    last_session: int
    process_key: bytes
    predecessor_key: bytes
    facts_digest: bytes
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., register_no: _Optional[int] = ..., highest_epoch_seen: _Optional[int] = ..., address: _Optional[str] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kv_cache_config: _Optional[_Union[_common_pb2.KVCacheConfig, _Mapping]] = ..., holds_state: _Optional[bool] = ..., max_model_len: _Optional[int] = ..., engine: _Optional[str] = ..., last_session: _Optional[int] = ..., process_key: _Optional[bytes] = ..., predecessor_key: _Optional[bytes] = ..., facts_digest: _Optional[bytes] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("epoch", "session", "lease_ms", "keep_alive_interval_ms", "report_wanted", "session_key")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    REPORT_WANTED_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    session: int
    lease_ms: int
    keep_alive_interval_ms: int
    report_wanted: bool
    session_key: bytes
    def __init__(self, epoch: _Optional[int] = ..., session: _Optional[int] = ..., lease_ms: _Optional[int] = ..., keep_alive_interval_ms: _Optional[int] = ..., report_wanted: _Optional[bool] = ..., session_key: _Optional[bytes] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("uplink", "part", "last", "contents", "sequences", "reserve", "idle_blocks", "units", "live")
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    IDLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    uplink: Uplink
    part: int
    last: bool
    contents: _containers.RepeatedCompositeFieldContainer[ContentRun]
    sequences: _containers.RepeatedCompositeFieldContainer[ReportedSequence]
    reserve: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    idle_blocks: _containers.RepeatedCompositeFieldContainer[IdleBlocks]
    units: _containers.RepeatedCompositeFieldContainer[ReportedUnit]
    live: bool
    def __init__(self, uplink: _Optional[_Union[Uplink, _Mapping]] = ..., part: _Optional[int] = ..., last: _Optional[bool] = ..., contents: _Optional[_Iterable[_Union[ContentRun, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[ReportedSequence, _Mapping]]] = ..., reserve: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., idle_blocks: _Optional[_Iterable[_Union[IdleBlocks, _Mapping]]] = ..., units: _Optional[_Iterable[_Union[ReportedUnit, _Mapping]]] = ..., live: _Optional[bool] = ...) -> None: ...

class ReportedUnit(_message.Message):
    __slots__ = ("root", "blocks")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    root: _common_pb2.Root
    blocks: _common_pb2.BlockRun
    def __init__(self, root: _Optional[_Union[_common_pb2.Root, _Mapping]] = ..., blocks: _Optional[_Union[_common_pb2.BlockRun, _Mapping]] = ...) -> None: ...

class ContentRun(_message.Message):
    __slots__ = ("parent", "root", "tokens", "blocks")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    parent: int
    root: _common_pb2.Root
    tokens: bytes
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    def __init__(self, parent: _Optional[int] = ..., root: _Optional[_Union[_common_pb2.Root, _Mapping]] = ..., tokens: _Optional[bytes] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ...) -> None: ...

class IdleBlocks(_message.Message):
    __slots__ = ("group", "tier", "block_ids")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    group: int
    tier: _common_pb2.Tier
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportedSequence(_message.Message):
    __slots__ = ("key", "root", "tokens", "num_computed_tokens", "num_cached_tokens", "tables", "scratch", "boundaries", "encoder_computed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    ENCODER_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SequenceKey
    root: _common_pb2.Root
    tokens: bytes
    num_computed_tokens: int
    num_cached_tokens: int
    tables: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    scratch: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    encoder_computed: bool
    def __init__(self, key: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., root: _Optional[_Union[_common_pb2.Root, _Mapping]] = ..., tokens: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., scratch: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., boundaries: _Optional[_Iterable[int]] = ..., encoder_computed: _Optional[bool] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("downlink",)
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    downlink: Downlink
    def __init__(self, downlink: _Optional[_Union[Downlink, _Mapping]] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("session", "downlink_ack", "load", "counts", "draining", "session_key", "answer_ack")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_ACK_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    ANSWER_ACK_FIELD_NUMBER: _ClassVar[int]
    session: int
    downlink_ack: int
    load: _common_pb2.WorkerLoad
    counts: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockCounts]
    draining: bool
    session_key: bytes
    answer_ack: int
    def __init__(self, session: _Optional[int] = ..., downlink_ack: _Optional[int] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., counts: _Optional[_Iterable[_Union[_common_pb2.BlockCounts, _Mapping]]] = ..., draining: _Optional[bool] = ..., session_key: _Optional[bytes] = ..., answer_ack: _Optional[int] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("lease_ms", "downlink", "number")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    downlink: Downlink
    number: int
    def __init__(self, lease_ms: _Optional[int] = ..., downlink: _Optional[_Union[Downlink, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("session", "session_key")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    session: int
    session_key: bytes
    def __init__(self, session: _Optional[int] = ..., session_key: _Optional[bytes] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "grace_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace_ms: int
    def __init__(self, worker_id: _Optional[str] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("uplink", "items")
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    uplink: Uplink
    items: _containers.RepeatedCompositeFieldContainer[AllocateItem]
    def __init__(self, uplink: _Optional[_Union[Uplink, _Mapping]] = ..., items: _Optional[_Iterable[_Union[AllocateItem, _Mapping]]] = ...) -> None: ...

class AllocateItem(_message.Message):
    __slots__ = ("key", "root", "tokens", "max_new_tokens", "no_wait", "max_cached_tokens", "boundaries", "retention_interval_tokens", "num_encoder_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_INTERVAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SequenceKey
    root: _common_pb2.Root
    tokens: bytes
    max_new_tokens: int
    no_wait: bool
    max_cached_tokens: int
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    retention_interval_tokens: int
    num_encoder_tokens: int
    def __init__(self, key: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., root: _Optional[_Union[_common_pb2.Root, _Mapping]] = ..., tokens: _Optional[bytes] = ..., max_new_tokens: _Optional[int] = ..., no_wait: _Optional[bool] = ..., max_cached_tokens: _Optional[int] = ..., boundaries: _Optional[_Iterable[int]] = ..., retention_interval_tokens: _Optional[int] = ..., num_encoder_tokens: _Optional[int] = ...) -> None: ...

class AllocateResponse(_message.Message):
    __slots__ = ("downlink", "results")
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    downlink: Downlink
    results: _containers.RepeatedCompositeFieldContainer[AllocateResult]
    def __init__(self, downlink: _Optional[_Union[Downlink, _Mapping]] = ..., results: _Optional[_Iterable[_Union[AllocateResult, _Mapping]]] = ...) -> None: ...

class AllocateResult(_message.Message):
    __slots__ = ("status", "granted", "wait")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    granted: Granted
    wait: Wait
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., wait: _Optional[_Union[Wait, _Mapping]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("tables", "num_cached_tokens", "scratch", "boundaries", "encoder_cached")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    ENCODER_CACHED_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    num_cached_tokens: int
    scratch: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    encoder_cached: bool
    def __init__(self, tables: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., scratch: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., boundaries: _Optional[_Iterable[int]] = ..., encoder_cached: _Optional[bool] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("leader", "position")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    leader: _common_pb2.SequenceKey
    position: int
    def __init__(self, leader: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., position: _Optional[int] = ...) -> None: ...

class SequenceUpdate(_message.Message):
    __slots__ = ("key", "start", "tokens", "num_computed_tokens", "bound", "released", "scratch", "encoder_computed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_FIELD_NUMBER: _ClassVar[int]
    ENCODER_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SequenceKey
    start: int
    tokens: bytes
    num_computed_tokens: int
    bound: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    released: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    scratch: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    encoder_computed: bool
    def __init__(self, key: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., start: _Optional[int] = ..., tokens: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., bound: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., released: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., scratch: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., encoder_computed: _Optional[bool] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("uplink", "items")
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    uplink: Uplink
    items: _containers.RepeatedCompositeFieldContainer[AppendItem]
    def __init__(self, uplink: _Optional[_Union[Uplink, _Mapping]] = ..., items: _Optional[_Iterable[_Union[AppendItem, _Mapping]]] = ...) -> None: ...

class AppendItem(_message.Message):
    __slots__ = ("update", "want_blocks")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    WANT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    update: SequenceUpdate
    want_blocks: int
    def __init__(self, update: _Optional[_Union[SequenceUpdate, _Mapping]] = ..., want_blocks: _Optional[int] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("downlink", "results")
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    downlink: Downlink
    results: _containers.RepeatedCompositeFieldContainer[AppendResult]
    def __init__(self, downlink: _Optional[_Union[Downlink, _Mapping]] = ..., results: _Optional[_Iterable[_Union[AppendResult, _Mapping]]] = ...) -> None: ...

class AppendResult(_message.Message):
    __slots__ = ("status", "tables", "num_sealed_tokens")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NUM_SEALED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    tables: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRun]
    num_sealed_tokens: int
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[_common_pb2.BlockRun, _Mapping]]] = ..., num_sealed_tokens: _Optional[int] = ...) -> None: ...

class FreeRequest(_message.Message):
    __slots__ = ("uplink", "items")
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    uplink: Uplink
    items: _containers.RepeatedCompositeFieldContainer[FreeItem]
    def __init__(self, uplink: _Optional[_Union[Uplink, _Mapping]] = ..., items: _Optional[_Iterable[_Union[FreeItem, _Mapping]]] = ...) -> None: ...

class FreeItem(_message.Message):
    __slots__ = ("update",)
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    update: SequenceUpdate
    def __init__(self, update: _Optional[_Union[SequenceUpdate, _Mapping]] = ...) -> None: ...

class FreeResponse(_message.Message):
    __slots__ = ("downlink",)
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    downlink: Downlink
    def __init__(self, downlink: _Optional[_Union[Downlink, _Mapping]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("uplink", "items")
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    uplink: Uplink
    items: _containers.RepeatedCompositeFieldContainer[ForkItem]
    def __init__(self, uplink: _Optional[_Union[Uplink, _Mapping]] = ..., items: _Optional[_Iterable[_Union[ForkItem, _Mapping]]] = ...) -> None: ...

class ForkItem(_message.Message):
    __slots__ = ("parent", "num_shared_blocks", "update")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    parent: _common_pb2.SequenceKey
    num_shared_blocks: int
    update: SequenceUpdate
    def __init__(self, parent: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., num_shared_blocks: _Optional[int] = ..., update: _Optional[_Union[SequenceUpdate, _Mapping]] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("downlink", "results")
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    downlink: Downlink
    results: _containers.RepeatedCompositeFieldContainer[ForkResult]
    def __init__(self, downlink: _Optional[_Union[Downlink, _Mapping]] = ..., results: _Optional[_Iterable[_Union[ForkResult, _Mapping]]] = ...) -> None: ...

class ForkResult(_message.Message):
    __slots__ = ("status", "num_sealed_tokens")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEALED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    num_sealed_tokens: int
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., num_sealed_tokens: _Optional[int] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("root", "tokens", "max_workers", "explain", "num_encoder_tokens", "num_needed_tokens")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    NUM_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEEDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    root: _common_pb2.Root
    tokens: bytes
    max_workers: int
    explain: bool
    num_encoder_tokens: int
    num_needed_tokens: int
    def __init__(self, root: _Optional[_Union[_common_pb2.Root, _Mapping]] = ..., tokens: _Optional[bytes] = ..., max_workers: _Optional[int] = ..., explain: _Optional[bool] = ..., num_encoder_tokens: _Optional[int] = ..., num_needed_tokens: _Optional[int] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("workers", "explanation", "why", "model")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[RoutedWorker]
    explanation: str
    why: ExplainResponse
    model: ServedModel
    def __init__(self, workers: _Optional[_Iterable[_Union[RoutedWorker, _Mapping]]] = ..., explanation: _Optional[str] = ..., why: _Optional[_Union[ExplainResponse, _Mapping]] = ..., model: _Optional[_Union[ServedModel, _Mapping]] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("facts_digest", "max_model_len", "max_encoder_tokens")
    FACTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    facts_digest: bytes
    max_model_len: int
    max_encoder_tokens: int
    def __init__(self, facts_digest: _Optional[bytes] = ..., max_model_len: _Optional[int] = ..., max_encoder_tokens: _Optional[int] = ...) -> None: ...

class RoutedWorker(_message.Message):
    __slots__ = ("worker_id", "address", "model_fingerprint", "num_cached_tokens", "num_in_flight_tokens", "load", "encoder_cached")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENCODER_CACHED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    model_fingerprint: str
    num_cached_tokens: int
    num_in_flight_tokens: int
    load: _common_pb2.WorkerLoad
    encoder_cached: bool
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., num_in_flight_tokens: _Optional[int] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., encoder_cached: _Optional[bool] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("worker_id", "include_blocks", "first_block", "max_blocks", "max_sequences", "group")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    include_blocks: bool
    first_block: int
    max_blocks: int
    max_sequences: int
    group: int
    def __init__(self, worker_id: _Optional[str] = ..., include_blocks: _Optional[bool] = ..., first_block: _Optional[int] = ..., max_blocks: _Optional[int] = ..., max_sequences: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("epoch", "workers", "num_prefix_nodes", "budget", "former_lease_remaining_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_NODES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    FORMER_LEASE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerDescription]
    num_prefix_nodes: int
    budget: Budget
    former_lease_remaining_ms: int
    def __init__(self, epoch: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerDescription, _Mapping]]] = ..., num_prefix_nodes: _Optional[int] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ..., former_lease_remaining_ms: _Optional[int] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("num_blocks", "max_blocks", "num_slots", "num_sequence_tokens", "max_tokens")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    max_blocks: int
    num_slots: int
    num_sequence_tokens: int
    max_tokens: int
    def __init__(self, num_blocks: _Optional[int] = ..., max_blocks: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_sequence_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("worker_id", "address", "session", "incarnation", "model_name", "model_fingerprint", "kv_cache_config", "max_model_len", "counts", "load", "num_sequences", "lease_remaining_ms", "blocks", "totals", "draining", "recovering", "sequences", "facts_digest", "max_encoder_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FACTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    session: int
    incarnation: int
    model_name: str
    model_fingerprint: str
    kv_cache_config: _common_pb2.KVCacheConfig
    max_model_len: int
    counts: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockCounts]
    load: _common_pb2.WorkerLoad
    num_sequences: int
    lease_remaining_ms: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockDescription]
    totals: WorkerTotals
    draining: bool
    recovering: bool
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceDescription]
    facts_digest: bytes
    max_encoder_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., session: _Optional[int] = ..., incarnation: _Optional[int] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kv_cache_config: _Optional[_Union[_common_pb2.KVCacheConfig, _Mapping]] = ..., max_model_len: _Optional[int] = ..., counts: _Optional[_Iterable[_Union[_common_pb2.BlockCounts, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., num_sequences: _Optional[int] = ..., lease_remaining_ms: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockDescription, _Mapping]]] = ..., totals: _Optional[_Union[WorkerTotals, _Mapping]] = ..., draining: _Optional[bool] = ..., recovering: _Optional[bool] = ..., sequences: _Optional[_Iterable[_Union[SequenceDescription, _Mapping]]] = ..., facts_digest: _Optional[bytes] = ..., max_encoder_tokens: _Optional[int] = ...) -> None: ...

class SequenceDescription(_message.Message):
    __slots__ = ("key", "num_tokens", "num_cached_tokens", "num_computed_tokens", "num_blocks", "fenced")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.SequenceKey
    num_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_blocks: int
    fenced: bool
    def __init__(self, key: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., num_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., fenced: _Optional[bool] = ...) -> None: ...

class WorkerTotals(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_cached_tokens", "num_evicted_blocks", "num_calls", "num_generated_tokens")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_evicted_blocks: int
    num_calls: int
    num_generated_tokens: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_evicted_blocks: _Optional[int] = ..., num_calls: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ...) -> None: ...

class BlockDescription(_message.Message):
    __slots__ = ("group", "tier", "block_id", "state", "ref_count", "generation", "token_count", "sealed", "block_hash", "table_index", "owners", "free_list_position")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REF_COUNT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TABLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    FREE_LIST_POSITION_FIELD_NUMBER: _ClassVar[int]
    group: int
    tier: _common_pb2.Tier
    block_id: int
    state: BlockState
    ref_count: int
    generation: int
    token_count: int
    sealed: bool
    block_hash: int
    table_index: int
    owners: _containers.RepeatedCompositeFieldContainer[_common_pb2.SequenceKey]
    free_list_position: int
    def __init__(self, group: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., block_id: _Optional[int] = ..., state: _Optional[_Union[BlockState, str]] = ..., ref_count: _Optional[int] = ..., generation: _Optional[int] = ..., token_count: _Optional[int] = ..., sealed: _Optional[bool] = ..., block_hash: _Optional[int] = ..., table_index: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[_common_pb2.SequenceKey, _Mapping]]] = ..., free_list_position: _Optional[int] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("violations", "num_blocks_checked", "num_sequences_checked", "num_nodes_checked", "num_sessions_checked")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_CHECKED_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_CHECKED_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedCompositeFieldContainer[Violation]
    num_blocks_checked: int
    num_sequences_checked: int
    num_nodes_checked: int
    num_sessions_checked: int
    def __init__(self, violations: _Optional[_Iterable[_Union[Violation, _Mapping]]] = ..., num_blocks_checked: _Optional[int] = ..., num_sequences_checked: _Optional[int] = ..., num_nodes_checked: _Optional[int] = ..., num_sessions_checked: _Optional[int] = ...) -> None: ...

class Violation(_message.Message):
    __slots__ = ("law", "message", "worker_id", "session", "block_id", "sequence", "group")
    LAW_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    law: str
    message: str
    worker_id: str
    session: int
    block_id: int
    sequence: _common_pb2.SequenceKey
    group: int
    def __init__(self, law: _Optional[str] = ..., message: _Optional[str] = ..., worker_id: _Optional[str] = ..., session: _Optional[int] = ..., block_id: _Optional[int] = ..., sequence: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., group: _Optional[int] = ...) -> None: ...

class DescribeBlockRequest(_message.Message):
    __slots__ = ("worker_id", "block_id", "group")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    block_id: int
    group: int
    def __init__(self, worker_id: _Optional[str] = ..., block_id: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class DescribeBlockResponse(_message.Message):
    __slots__ = ("epoch", "block", "root", "salt_number", "tokens", "prefix_block_ids", "owner_block_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SALT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    OWNER_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    block: BlockDescription
    root: _common_pb2.Root
    salt_number: int
    tokens: bytes
    prefix_block_ids: _containers.RepeatedScalarFieldContainer[int]
    owner_block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., block: _Optional[_Union[BlockDescription, _Mapping]] = ..., root: _Optional[_Union[_common_pb2.Root, _Mapping]] = ..., salt_number: _Optional[int] = ..., tokens: _Optional[bytes] = ..., prefix_block_ids: _Optional[_Iterable[int]] = ..., owner_block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("picture", "contents")
    PICTURE_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    picture: PictureOptions
    contents: ContentsOptions
    def __init__(self, picture: _Optional[_Union[PictureOptions, _Mapping]] = ..., contents: _Optional[_Union[ContentsOptions, _Mapping]] = ...) -> None: ...

class PictureOptions(_message.Message):
    __slots__ = ("interval_ms", "worker_id", "include_blocks", "max_sequences")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    worker_id: str
    include_blocks: bool
    max_sequences: int
    def __init__(self, interval_ms: _Optional[int] = ..., worker_id: _Optional[str] = ..., include_blocks: _Optional[bool] = ..., max_sequences: _Optional[int] = ...) -> None: ...

class ContentsOptions(_message.Message):
    __slots__ = ("epoch", "after")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    after: int
    def __init__(self, epoch: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("picture", "contents")
    PICTURE_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    picture: Picture
    contents: Contents
    def __init__(self, picture: _Optional[_Union[Picture, _Mapping]] = ..., contents: _Optional[_Union[Contents, _Mapping]] = ...) -> None: ...

class Picture(_message.Message):
    __slots__ = ("epoch", "number", "whole", "complete", "workers", "ended_sessions", "cluster")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    whole: bool
    complete: bool
    workers: _containers.RepeatedCompositeFieldContainer[WorkerPicture]
    ended_sessions: _containers.RepeatedScalarFieldContainer[int]
    cluster: ClusterPicture
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., whole: _Optional[bool] = ..., complete: _Optional[bool] = ..., workers: _Optional[_Iterable[_Union[WorkerPicture, _Mapping]]] = ..., ended_sessions: _Optional[_Iterable[int]] = ..., cluster: _Optional[_Union[ClusterPicture, _Mapping]] = ...) -> None: ...

class ClusterPicture(_message.Message):
    __slots__ = ("num_prefix_nodes", "budget", "num_audits", "num_violations")
    NUM_PREFIX_NODES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    NUM_AUDITS_FIELD_NUMBER: _ClassVar[int]
    NUM_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    num_prefix_nodes: int
    budget: Budget
    num_audits: int
    num_violations: int
    def __init__(self, num_prefix_nodes: _Optional[int] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ..., num_audits: _Optional[int] = ..., num_violations: _Optional[int] = ...) -> None: ...

class WorkerPicture(_message.Message):
    __slots__ = ("session", "worker", "blocks", "sequences", "ended_sequences")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ENDED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    session: int
    worker: WorkerDescription
    blocks: _containers.RepeatedCompositeFieldContainer[BlockPicture]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceDescription]
    ended_sequences: _containers.RepeatedCompositeFieldContainer[_common_pb2.SequenceKey]
    def __init__(self, session: _Optional[int] = ..., worker: _Optional[_Union[WorkerDescription, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockPicture, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[SequenceDescription, _Mapping]]] = ..., ended_sequences: _Optional[_Iterable[_Union[_common_pb2.SequenceKey, _Mapping]]] = ...) -> None: ...

class BlockPicture(_message.Message):
    __slots__ = ("group", "tier", "block_ids", "first_block", "states", "ref_counts", "last_used", "salt_numbers")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_FIELD_NUMBER: _ClassVar[int]
    SALT_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    group: int
    tier: _common_pb2.Tier
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    first_block: int
    states: bytes
    ref_counts: bytes
    last_used: bytes
    salt_numbers: bytes
    def __init__(self, group: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., block_ids: _Optional[_Iterable[int]] = ..., first_block: _Optional[int] = ..., states: _Optional[bytes] = ..., ref_counts: _Optional[bytes] = ..., last_used: _Optional[bytes] = ..., salt_numbers: _Optional[bytes] = ...) -> None: ...

class Contents(_message.Message):
    __slots__ = ("epoch", "whole_begins", "whole_ends", "events")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WHOLE_BEGINS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_ENDS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    whole_begins: bool
    whole_ends: bool
    events: _containers.RepeatedCompositeFieldContainer[ContentEvent]
    def __init__(self, epoch: _Optional[int] = ..., whole_begins: _Optional[bool] = ..., whole_ends: _Optional[bool] = ..., events: _Optional[_Iterable[_Union[ContentEvent, _Mapping]]] = ...) -> None: ...

class ContentEvent(_message.Message):
    __slots__ = ("number", "stored", "removed", "cleared", "served")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    number: int
    stored: ContentStored
    removed: ContentRemoved
    cleared: PoolCleared
    served: ContentServed
    def __init__(self, number: _Optional[int] = ..., stored: _Optional[_Union[ContentStored, _Mapping]] = ..., removed: _Optional[_Union[ContentRemoved, _Mapping]] = ..., cleared: _Optional[_Union[PoolCleared, _Mapping]] = ..., served: _Optional[_Union[ContentServed, _Mapping]] = ...) -> None: ...

class ContentStored(_message.Message):
    __slots__ = ("node", "parent", "root", "salt_number", "tokens", "block_hash", "session", "worker_id", "sequence", "block_size", "group")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SALT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    node: int
    parent: int
    root: _common_pb2.Root
    salt_number: int
    tokens: bytes
    block_hash: int
    session: int
    worker_id: str
    sequence: _common_pb2.SequenceKey
    block_size: int
    group: int
    def __init__(self, node: _Optional[int] = ..., parent: _Optional[int] = ..., root: _Optional[_Union[_common_pb2.Root, _Mapping]] = ..., salt_number: _Optional[int] = ..., tokens: _Optional[bytes] = ..., block_hash: _Optional[int] = ..., session: _Optional[int] = ..., worker_id: _Optional[str] = ..., sequence: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., block_size: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class ContentRemoved(_message.Message):
    __slots__ = ("node", "session", "forgotten", "group")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    node: int
    session: int
    forgotten: bool
    group: int
    def __init__(self, node: _Optional[int] = ..., session: _Optional[int] = ..., forgotten: _Optional[bool] = ..., group: _Optional[int] = ...) -> None: ...

class PoolCleared(_message.Message):
    __slots__ = ("session", "worker_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    session: int
    worker_id: str
    def __init__(self, session: _Optional[int] = ..., worker_id: _Optional[str] = ...) -> None: ...

class ContentServed(_message.Message):
    __slots__ = ("sequence", "session", "node", "num_cached_tokens", "num_prompt_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: _common_pb2.SequenceKey
    session: int
    node: int
    num_cached_tokens: int
    num_prompt_tokens: int
    def __init__(self, sequence: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., session: _Optional[int] = ..., node: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("root", "tokens", "worker_id")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    root: _common_pb2.Root
    tokens: bytes
    worker_id: str
    def __init__(self, root: _Optional[_Union[_common_pb2.Root, _Mapping]] = ..., tokens: _Optional[bytes] = ..., worker_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("epoch", "workers", "closest", "num_workers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CLOSEST_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerExplanation]
    closest: ClosestPrompt
    num_workers: int
    def __init__(self, epoch: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerExplanation, _Mapping]]] = ..., closest: _Optional[_Union[ClosestPrompt, _Mapping]] = ..., num_workers: _Optional[int] = ...) -> None: ...

class WorkerExplanation(_message.Message):
    __slots__ = ("worker_id", "num_cached_tokens", "miss", "encoder_cached")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_CACHED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_cached_tokens: int
    miss: Miss
    encoder_cached: bool
    def __init__(self, worker_id: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., miss: _Optional[_Union[Miss, _Mapping]] = ..., encoder_cached: _Optional[bool] = ...) -> None: ...

class Miss(_message.Message):
    __slots__ = ("position", "cause", "evicted_ms_ago", "evicted_for", "other_root", "other_block_size", "other_salt", "leader", "leader_position", "other_worker_id", "num_passed_tokens")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    EVICTED_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FOR_FIELD_NUMBER: _ClassVar[int]
    OTHER_ROOT_FIELD_NUMBER: _ClassVar[int]
    OTHER_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    OTHER_SALT_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    LEADER_POSITION_FIELD_NUMBER: _ClassVar[int]
    OTHER_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    position: int
    cause: MissCause
    evicted_ms_ago: int
    evicted_for: _common_pb2.SequenceKey
    other_root: _common_pb2.Root
    other_block_size: int
    other_salt: bool
    leader: _common_pb2.SequenceKey
    leader_position: int
    other_worker_id: str
    num_passed_tokens: int
    def __init__(self, position: _Optional[int] = ..., cause: _Optional[_Union[MissCause, str]] = ..., evicted_ms_ago: _Optional[int] = ..., evicted_for: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., other_root: _Optional[_Union[_common_pb2.Root, _Mapping]] = ..., other_block_size: _Optional[int] = ..., other_salt: _Optional[bool] = ..., leader: _Optional[_Union[_common_pb2.SequenceKey, _Mapping]] = ..., leader_position: _Optional[int] = ..., other_worker_id: _Optional[str] = ..., num_passed_tokens: _Optional[int] = ...) -> None: ...

class ClosestPrompt(_message.Message):
    __slots__ = ("num_equal_tokens", "prompt_token", "cached_token", "num_prompts", "num_tokens_gained", "truncated", "num_different_tokens")
    NUM_EQUAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_GAINED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    NUM_DIFFERENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_equal_tokens: int
    prompt_token: int
    cached_token: int
    num_prompts: int
    num_tokens_gained: int
    truncated: bool
    num_different_tokens: int
    def __init__(self, num_equal_tokens: _Optional[int] = ..., prompt_token: _Optional[int] = ..., cached_token: _Optional[int] = ..., num_prompts: _Optional[int] = ..., num_tokens_gained: _Optional[int] = ..., truncated: _Optional[bool] = ..., num_different_tokens: _Optional[int] = ...) -> None: ...
