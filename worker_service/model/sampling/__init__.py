"""From logits to tokens. `sampler.sample` is the entry; every row of a batch is treated as if it were alone."""
