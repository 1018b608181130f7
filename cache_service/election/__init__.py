"""Which process leads, and under which epoch: one interface, and a file or a Lease of Kubernetes behind it."""
