"""Which models the native step computes: recognised by their modules, and checked by what they compute. Enter by `try_native`."""
