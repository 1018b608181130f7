"""`kvpool top`: the live view."""
