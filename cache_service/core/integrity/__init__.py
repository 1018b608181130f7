"""Check: the manager's laws, recomputed from first principles and compared with what it keeps. Changes nothing.

Each violation names the law, the worker, and the block and sequence if there is one. The laws:

* conservation: free + cached + held + reserved + withheld = capacity, and each kept count is the number of blocks in that state
* budget: what all workers have together is the sum of what each has; a session has the blocks up to the highest ever granted, and
  the tokens of its live sequences; of the blocks after that none was granted
* references: a block's ref_count is the number of table entries and scratch blocks of live sequences that name it
* free list: linked both ways without a cycle, and exactly the free and cached blocks are on it
* state: held means ref_count ≥ 1; free and reserved blocks hold nothing; cached blocks serve hits
* null block: block 0 is in no table and in no state but free
* generation: every granted block has a stamp, none larger than the last one given
* sealing: a node's copy in a pool and that pool's block point at each other; exactly the full computed blocks of a sequence are
  sealed
* fork: blocks that several tables share are sealed
* scratch: a scratch block belongs to one live sequence, and is not sealed
* window: the entries of a sequence's window are sealed blocks that hold its tokens
* unit: the KV of an encoder's input is in distinct blocks of one state, sealed together and known to its root; a sequence has all
  of one, and has computed no token without it
* dependents: a copy in a group with a window has a copy in every group without one
* chain: a sequence's nodes hold its tokens, each the child of the one before
* tree: child and parent point at each other; a node without copy, child and sequence is gone; counts and leaders are right
* attempts: the index of attempts holds exactly the live sequences

An audit runs in slices, between which the manager answers calls (`OnlineAudit` explains why this is right), or at once (`audit`).
"""

from .findings import Audit, Violation
from .online import OnlineAudit, audit
from .world import World

__all__ = ["Audit", "OnlineAudit", "Violation", "World", "audit"]
