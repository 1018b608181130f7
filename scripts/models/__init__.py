"""Which of transformers' causal language models run over the paged KV: each tried as a tiny model, written to docs/MODELS.md."""
