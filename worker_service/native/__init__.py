"""A step in one call: the forward pass over paged KV in C, on a team of threads of its own. Enter by `Program`."""
