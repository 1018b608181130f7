"""Decides which process leads, and under which epoch. A file or a Lease of Kubernetes implements the interface."""
