"""kvpool's client: generate and chat over a cluster of workers that share KV blocks.

from kvpool.client import SyncClient

with SyncClient() as client:
    for chunk in client.chat([{"role": "user", "content": "What is the capital of France?"}]):
        print(chunk.text, end="", flush=True)
"""

from .chunk import Chunk, FinishReason, TokenLogprobs, Usage
from .client import Client
from .completion import Completion
from .config import ClientConfig
from .errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    KvpoolError,
    NotFound,
    PermissionDenied,
    ProtocolError,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    Unimplemented,
)
from .messages import Message
from .model import Model
from .options import GenerateOptions
from .stream import GenerateStream
from .sync_client import SyncClient, SyncStream

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Cancelled",
    "Chunk",
    "Client",
    "ClientConfig",
    "Completion",
    "DeadlineExceeded",
    "FailedPrecondition",
    "FinishReason",
    "GenerateOptions",
    "GenerateStream",
    "InvalidRequest",
    "KvpoolError",
    "Message",
    "Model",
    "NotFound",
    "PermissionDenied",
    "ProtocolError",
    "ResourceExhausted",
    "ServiceError",
    "SyncClient",
    "SyncStream",
    "TokenLogprobs",
    "Unavailable",
    "Unimplemented",
    "Usage",
]
