"""Import this before grpc in a service: it keeps gRPC's C core from writing to stderr.

The core reads its verbosity once, when it is imported. It writes a line for each malformed header that a peer sends, so a peer
could fill a disk. What an operator needs of it, a port that cannot be taken, is in errors of our own. A value that the environment
already has is left alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
