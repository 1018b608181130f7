"""`kvpool walkthrough`: plays stories on the manager's real core and a worker's real cache side, and shows the core's state."""
