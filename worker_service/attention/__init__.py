"""Paged attention: the layout of a step's packed rows, the KV layers, and the backends that read and write them.

# Batch invariance

On a CPU the logits of a token have the same bits in any step, natively in every type, with torch in float32: alone or
packed, in any order, in chunks of any length, with a prefix computed or found, and again after a preemption. So a
seed gives one text, and so does greedy choice where two logits are close. Between numbers of threads, versions of
torch and machines bits may differ. In bfloat16 with torch, and on a GPU, nothing of this is promised: there is one
segment for a shared prefix and one for the rest, which is faster.

Which terms of a sum a BLAS adds first depends on the CPU: MKL on Zen 4 adds up to 192 terms in one pass and cuts 193
to 384 in halves, so hidden keys that lengthen a product change the bits of all rows, although they add only zeros. No
switch makes one CPU compute as another. So a worker tries at load, in the thread and with the number of threads of
its steps:

* Attention (`invariance`) sums over partitions of the keys from position 0 on, and merges them from left to right.
  For each shape of heads it computes a random text at once, and then pieces of it: with every number of keys, alone,
  in company, at other offsets, with a shared prefix. It takes the longest partition of 256 to 16 keys in which no row
  changes a bit; if there is none, attention adds in an order of its own from elementwise operations
  (`softmax.attend_in_fixed_order`): right, and many times slower.
* Linear layers (`model.forward.packed_linear`) are packed for oneDNN; a single row is computed twice, since oneDNN
  computes one row differently.
* Functions and other products (`model.forward.invariant`) are found in a first forward pass, by what each module
  calls, and replaced.
* The whole model (`model.guard.batch_invariance`) computes a short text at once and in chunks with a neighbour.

The log and `GetModel` say what was found. If something differs, the worker serves with a warning that nothing is
promised.
"""
