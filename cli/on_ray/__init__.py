"""Runs a cluster on the nodes of a Ray cluster. Ray places the processes and restarts them; nothing here repeats that."""
