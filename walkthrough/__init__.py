"""`kvpool walkthrough`: plays stories on the manager's real core, one operation at a time, and shows all of its state."""
