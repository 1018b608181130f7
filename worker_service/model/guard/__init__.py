"""Checks whether a model can be served: its structure, a tiny replica of it, and the loaded model. The entry is `support`."""
