"""Sets variables that Ray reads when it is imported. Import this module first."""

import os

# Ray does not replace a loopback address by the machine's own then, which nothing listens on.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
