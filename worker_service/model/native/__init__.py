"""Which models the native step computes: recognised by a recorded forward pass, checked by their logits. Enter by `try_native`.
And whether torch is faster for them here: `Comparison`."""
