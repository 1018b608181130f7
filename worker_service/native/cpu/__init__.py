"""A step in one call on a CPU: the forward pass over paged KV in C, on a team of threads of its own. Enter by `Program`.

* **Layers** (`..description`): attention and MLP one after the other or both at once; RMSNorm or LayerNorm before and
  after each; Q, K and V from separate or joint linear layers, with biases and norms; rotation of whole heads or a
  part; windows, soft caps; MLPs with or without a gate. Not known: mixtures of experts, attention sinks, latent
  attention, layers that share KV.
* **Building** (`targets`, setup.py): an installation compiles the C for every kind of CPU in the list, into `builds/`;
  what its compiler cannot compile is left out. `selection` takes the fastest build that this CPU can run, by the
  CPU's flags and, for AMX, Linux's permission. If there is none, or if it is older than its source, torch serves.
  All CPUs for which a build is taken compute the same bits with it.
* **Arithmetic** (`csrc/`): every output is one sum over k = 0, 1, …; keys are summed in partitions of 256, folded
  from the first to the last. Nothing depends on the step, so bits are the same alone, packed, permuted, chunked,
  shared and decoded, with any number of threads.
* **AMX** (`csrc/tiles.h`): bfloat16 products in tile registers, whatever the number of rows. Each operation on
  registers has a second implementation in plain C, with which tests run such a build on any CPU. No CPU with AMX has
  run it yet.
* **int8** (`weights`, `csrc/quantized.h`): weights have one scale for each output, activations one for each 64
  numbers of a row; the integers of a group are summed exactly. It is another model than the one without: its
  fingerprint differs.
* **Memory**: a step of few tokens takes as long as reading weights and KV. Both are in huge pages, weights in the
  order of the step, and each tile prefetches the next.
* **The last layer** writes K and V of all tokens; what follows is computed for tokens whose logits are wanted only.
* **Attention** reads K and V in place. Decodes that share at least a partition, and 1,024 tokens in all, attend to it
  together.
* **Threads** (`csrc/team.h`): a phase is a number of pieces, each thread takes the next, and the phase is over when
  its pieces are done: a thread that gets no CPU delays nobody. Waiting threads spin for 20 µs, then sleep.
"""
