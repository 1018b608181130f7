"""How many blocks of KV fit: what a model and its largest step need, and what the device has. The entry is `plan`."""
