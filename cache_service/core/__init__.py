"""The pure core of the cache manager: blocks, prefixes, sequences, sessions. No I/O, no wire format, no event loop, no clock."""
