"""The forward pass over paged KV: KV tensors, layers, the rows of a step, and the runner. The entry is `runner`.

# Recurrent layers

Gated delta nets, Mamba and short convolutions keep one state of a sequence, which every token changes. A block of the
state group, the last one of a worker, has the states of all these layers after some number of tokens.

* A *mixer* is a module that asks transformers' cache for a state (`mixers`): one forward pass with a cache that notes
  who asks for what. No model is known by name. A layer that keeps its state elsewhere (RecurrentGemma) is refused.
* Its forward is replaced (`mixer_binding`): it divides the packed row by sequence, gathers each one's state from its
  `source`, calls the module, and writes what they became to `running`, and to `snapshot` if a part has one. All
  states are read before any is written. Single tokens are one call for all sequences; longer parts are computed one
  by one, so a chunk never depends on its neighbours.
* Some scans begin with zeros when they get several tokens, whatever their state (Mamba, Jamba). It shows by
  behaviour: the next token must come out the same alone and as the first of several. The scan is linear in its state,
  so what the state adds is added afterwards (`scan`), if that equals single tokens at load; else tokens of later
  chunks are computed one by one.
* transformers clamps the length of a time step in chunks but not in single tokens (Nemotron-H, Zamba2); here both are
  (`scan`).
* Inside a chunk these layers work through pieces of fixed size, so chunks end at multiples of lcm(block size, 64) of
  absolute positions (`cache.groups.state.grid_tokens`): a hit continues as the cold run did. After a preemption chunks run
  where single tokens ran before, so states are equal to rounding only, and batch invariance is never promised with
  recurrent layers.
* A snapshot is read once more after the step; one that is not finite counts as a row that is not.

# Encoder-decoder models

The prompt feeds the encoder, and the text is the decoder's (`encoder_decoder`, `seq2seq`).

* The encoder is transformers' own and sees one input at a time: no padding, and the same bits whatever else is in the
  step. Then the decoder runs over one token whose attention does nothing, except that each cross layer writes K and V
  into the blocks of the cross group: so nothing has to be known of where a layer projects them. From then on the
  decoder is given one row of zeros as the encoder's output, which nobody reads.
* Most of these decoders take no position ids. Modules that return the same for two texts that differ everywhere are
  positions (`given_positions`): each is called once on the longest text, and then looks up the positions of the
  sequences.
* T5 adds a number for the distance of a key to each score (`seq2seq`): what the last token of the longest text
  gets is the table of all distances; the backend looks its own up.
* Experts with a capacity (Switch) drop tokens of a row. `generate` gives a decoder one token at a time, so the
  decoder's limit is taken off.
* Refused: decoders that attend to text and input in one call (T5Gemma 2), attention in a model's own code (LED,
  ProphetNet), speech, images.
"""
