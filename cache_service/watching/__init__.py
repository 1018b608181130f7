"""Watch: what changes, sent as it changes, to those who ask for it."""
