"""The model side of a worker: finding, converting, guarding and loading a model, its KV tensors, forward and sampling."""

import os

# Before torch is imported: OpenMP reads it when its library is loaded. By default, threads that wait for the others of a product
# spin; if processes share cores (several workers on one machine), they spin on cores that the others need, and a step takes many
# times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
