"""The model side of a worker: finding, converting, guarding and loading a model, its KV tensors, forward and sampling."""
