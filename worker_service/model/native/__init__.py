"""Which models the native step computes, and when torch is taken instead.

`recognition` describes a model by one recorded forward pass of a few tokens, at positions from the first to the last
possible one. A module's inputs are the outputs of another, or of a norm, or their sum: this shows the arrangement, so
neither names nor the order of modules count, and no model is known by name. Functions are recognised by trying them:
activations, norms, rotations by the model's own tables. Outputs of linear layers are much larger than usual for some
tokens, so that a clamp shows.

The description may be wrong, so what it computes is checked (`check`): first a replica of the model's kind in
float32, then the model itself, in a prefill, in chunks with others and in decodes, over NaN in all slots that no
token has written. A model that fails is served by torch, and the log has the reason.

`comparison`: where torch uses a matrix unit that the loaded step does not (AMX, BFMMLA), the first start times both,
by what 8 requests of 512 + 128 tokens would take, and keeps the choice.
"""
