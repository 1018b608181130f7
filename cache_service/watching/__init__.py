"""Watch: what changes, sent as it changes."""
