"""Whether a model may be served: its structure, a tiny replica of it, and the loaded model itself. The entry is `support`."""
