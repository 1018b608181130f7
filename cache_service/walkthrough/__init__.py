"""`kvpool walkthrough`: the real core of the manager, one operation at a time, with everything it keeps on show."""
