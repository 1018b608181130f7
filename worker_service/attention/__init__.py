"""Paged attention: the layout of a step's packed rows, the KV layers, and the backends that read and write them."""
