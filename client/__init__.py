"""The Python client of a kvpool cluster: text and chat over workers that share KV blocks.

```python
from kvpool.client import SyncClient

question = {"role": "user", "content": "What is the capital of France?"}
with SyncClient() as client:  # on this machine, or KVPOOL_MANAGER=host:port
    for chunk in client.chat([question], max_tokens=40):  # chunk by chunk, as the tokens come
        print(chunk.text, end="", flush=True)
    answer = client.chat([question], max_tokens=40).collect()  # the whole answer: a Completion
    print(answer.text, answer.num_cached_tokens, answer.finish_reason)
    client.generate("Once upon a time", temperature=0.8, top_p=0.95, seed=7, max_tokens=40).collect()
```

The default temperature is 0: always the most likely token. `Client` has the same methods for asyncio: `async for chunk in
client.chat(…)`, and `await client.chat(…).collect()`. All errors are subclasses of `KvpoolError`.
"""

from .chunk import Chunk, FinishReason, Times, TokenLogprobs, Usage
from .client import Client
from .completion import Completion
from .config import ClientConfig
from .contents_view import ContentNode, ContentsView
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
from .explanation import ClosestPrompt, Explanation, Miss, MissCause, WorkerExplanation
from .messages import Message
from .model import Model
from .options import GenerateOptions
from .picture_view import PictureView, PoolView, WorkerView
from .stream import GenerateStream
from .sync_client import SyncClient, SyncStream
from .watch import ManagerAway

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Cancelled",
    "Chunk",
    "Client",
    "ClientConfig",
    "ClosestPrompt",
    "Completion",
    "ContentNode",
    "ContentsView",
    "DeadlineExceeded",
    "Explanation",
    "FailedPrecondition",
    "FinishReason",
    "GenerateOptions",
    "GenerateStream",
    "InvalidRequest",
    "KvpoolError",
    "ManagerAway",
    "Message",
    "Miss",
    "MissCause",
    "Model",
    "NotFound",
    "PermissionDenied",
    "PictureView",
    "PoolView",
    "ProtocolError",
    "ResourceExhausted",
    "ServiceError",
    "SyncClient",
    "SyncStream",
    "Times",
    "TokenLogprobs",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "WorkerExplanation",
    "WorkerView",
]
