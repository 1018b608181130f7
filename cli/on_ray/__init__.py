"""A cluster on the nodes of a Ray cluster. Ray places the processes and starts them again; nothing here does it a second time."""
