"""The source of a model: resolves its name, fetches, converts and fingerprints it. The entry is `resolve`."""
