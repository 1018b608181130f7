"""Child processes of `kvpool up`: a manager and workers, their restarts, GPUs and logs."""
