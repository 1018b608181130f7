"""The live page: its files, and what its routes answer with."""
