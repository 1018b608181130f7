"""Where a model comes from: its name is resolved, fetched, converted and given a fingerprint. The entry is `resolve`."""
