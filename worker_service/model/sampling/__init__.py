"""Chooses tokens by logits. `sampler.sample` is the entry; a row's result does not depend on the batch."""
