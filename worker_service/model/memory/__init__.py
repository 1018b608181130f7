"""Number of KV blocks that fit, from the needs of a model and its largest step, and the device's memory. The entry is `plan`."""
