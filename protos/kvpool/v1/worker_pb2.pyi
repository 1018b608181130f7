from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelFile(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_FILE_UNSPECIFIED: _ClassVar[ModelFile]
    MODEL_FILE_TOKENIZER: _ClassVar[ModelFile]
    MODEL_FILE_CHAT_TEMPLATE: _ClassVar[ModelFile]
    MODEL_FILE_SPECIAL_TOKENS: _ClassVar[ModelFile]

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_FULL: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
MODEL_FILE_UNSPECIFIED: ModelFile
MODEL_FILE_TOKENIZER: ModelFile
MODEL_FILE_CHAT_TEMPLATE: ModelFile
MODEL_FILE_SPECIAL_TOKENS: ModelFile
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_FULL: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GetModelRequest(_message.Message):
    __slots__ = ("facts_only",)
    FACTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    facts_only: bool
    def __init__(self, facts_only: _Optional[bool] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("facts", "part")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    facts: ModelFacts
    part: FilePart
    def __init__(self, facts: _Optional[_Union[ModelFacts, _Mapping]] = ..., part: _Optional[_Union[FilePart, _Mapping]] = ...) -> None: ...

class ModelFacts(_message.Message):
    __slots__ = ("worker_id", "model_name", "model_fingerprint", "architecture", "dtype", "device", "vocab_size", "max_model_len", "max_num_seqs", "block_size", "eos_token_ids", "files", "batch_invariance", "is_encoder_decoder", "decoder_start_token_id", "max_encoder_tokens", "forced_bos_token_id", "keeps_boundaries", "defaults", "end_of_turn_token_ids", "facts_digest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANCE_FIELD_NUMBER: _ClassVar[int]
    IS_ENCODER_DECODER_FIELD_NUMBER: _ClassVar[int]
    DECODER_START_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    KEEPS_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    END_OF_TURN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FACTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model_name: str
    model_fingerprint: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    files: _containers.RepeatedCompositeFieldContainer[FileInfo]
    batch_invariance: BatchInvariance
    is_encoder_decoder: bool
    decoder_start_token_id: int
    max_encoder_tokens: int
    forced_bos_token_id: int
    keeps_boundaries: bool
    defaults: GenerationDefaults
    end_of_turn_token_ids: _containers.RepeatedScalarFieldContainer[int]
    facts_digest: bytes
    def __init__(self, worker_id: _Optional[str] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., block_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., files: _Optional[_Iterable[_Union[FileInfo, _Mapping]]] = ..., batch_invariance: _Optional[_Union[BatchInvariance, _Mapping]] = ..., is_encoder_decoder: _Optional[bool] = ..., decoder_start_token_id: _Optional[int] = ..., max_encoder_tokens: _Optional[int] = ..., forced_bos_token_id: _Optional[int] = ..., keeps_boundaries: _Optional[bool] = ..., defaults: _Optional[_Union[GenerationDefaults, _Mapping]] = ..., end_of_turn_token_ids: _Optional[_Iterable[int]] = ..., facts_digest: _Optional[bytes] = ...) -> None: ...

class GenerationDefaults(_message.Message):
    __slots__ = ("sampling", "stop", "beam_search", "max_length", "min_length")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MIN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    sampling: SamplingParams
    stop: StopConditions
    beam_search: BeamSearch
    max_length: int
    min_length: int
    def __init__(self, sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopConditions, _Mapping]] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., max_length: _Optional[int] = ..., min_length: _Optional[int] = ...) -> None: ...

class BatchInvariance(_message.Message):
    __slots__ = ("promised", "attention_partition", "reason")
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_PARTITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    promised: bool
    attention_partition: int
    reason: str
    def __init__(self, promised: _Optional[bool] = ..., attention_partition: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class FileInfo(_message.Message):
    __slots__ = ("file", "size_bytes", "digest")
    FILE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    file: ModelFile
    size_bytes: int
    digest: bytes
    def __init__(self, file: _Optional[_Union[ModelFile, str]] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class FilePart(_message.Message):
    __slots__ = ("file", "offset_bytes", "data")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file: ModelFile
    offset_bytes: int
    data: bytes
    def __init__(self, file: _Optional[_Union[ModelFile, str]] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("sequence_id", "attempt", "text", "token_ids", "adapter", "tenant_salt", "model_fingerprint", "sampling", "stop", "logprobs", "num_delivered_tokens", "prompt_logprobs", "echo", "priority", "tenant", "boundaries", "n", "beam_search")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_DELIVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    attempt: int
    text: str
    token_ids: TokenIds
    adapter: str
    tenant_salt: str
    model_fingerprint: str
    sampling: SamplingParams
    stop: StopConditions
    logprobs: int
    num_delivered_tokens: int
    prompt_logprobs: int
    echo: bool
    priority: int
    tenant: str
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    n: int
    beam_search: BeamSearch
    def __init__(self, sequence_id: _Optional[str] = ..., attempt: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., adapter: _Optional[str] = ..., tenant_salt: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopConditions, _Mapping]] = ..., logprobs: _Optional[int] = ..., num_delivered_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., echo: _Optional[bool] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., boundaries: _Optional[_Iterable[int]] = ..., n: _Optional[int] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("num_beams", "length_penalty", "early_stopping")
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    num_beams: int
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, num_beams: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_eos_token_id")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENCODER_NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_IDS_FIELD_NUMBER: _ClassVar[int]
    FORCED_EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    no_repeat_ngram_size: int
    encoder_no_repeat_ngram_size: int
    suppress_tokens: TokenIds
    begin_suppress_tokens: TokenIds
    bad_words_ids: TokenIdLists
    forced_eos_token_id: TokenIds
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., no_repeat_ngram_size: _Optional[int] = ..., encoder_no_repeat_ngram_size: _Optional[int] = ..., suppress_tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., begin_suppress_tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., bad_words_ids: _Optional[_Union[TokenIdLists, _Mapping]] = ..., forced_eos_token_id: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class TokenIdLists(_message.Message):
    __slots__ = ("lists",)
    LISTS_FIELD_NUMBER: _ClassVar[int]
    lists: _containers.RepeatedCompositeFieldContainer[TokenIds]
    def __init__(self, lists: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "stop_token_ids", "stop_strings", "ignore_eos", "min_tokens")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    min_tokens: int
    def __init__(self, max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("start_index", "token_ids", "text", "logprobs", "usage", "finish_reason", "prompt_logprobs", "index", "score")
    START_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    start_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    usage: Usage
    finish_reason: FinishReason
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    index: int
    score: float
    def __init__(self, start_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., index: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("number", "start", "cancel")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: GenerateRequest
    cancel: Cancel
    def __init__(self, number: _Optional[int] = ..., start: _Optional[_Union[GenerateRequest, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    def __init__(self, answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("number", "response", "status")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    number: int
    response: GenerateResponse
    status: _status_pb2.Status
    def __init__(self, number: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: TokenLogprobs
    def __init__(self, logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_preemptions", "times")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    times: Times
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., times: _Optional[_Union[Times, _Mapping]] = ...) -> None: ...

class Times(_message.Message):
    __slots__ = ("waiting_ms", "prefill_ms", "decode_ms", "preempted_ms")
    WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_MS_FIELD_NUMBER: _ClassVar[int]
    waiting_ms: int
    prefill_ms: int
    decode_ms: int
    preempted_ms: int
    def __init__(self, waiting_ms: _Optional[int] = ..., prefill_ms: _Optional[int] = ..., decode_ms: _Optional[int] = ..., preempted_ms: _Optional[int] = ...) -> None: ...
