"""Tries each of transformers' causal language models over the paged KV, as a tiny model, and writes docs/MODELS.md."""
