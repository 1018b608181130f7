"""`kvpool walkthrough`: stories played on the manager's real core, one operation at a time, with all that it keeps."""
