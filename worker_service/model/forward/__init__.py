"""The forward pass over paged KV: KV tensors, layers, the rows of a step, and the runner. The entry is `runner`."""
