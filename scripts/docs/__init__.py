"""`make docs`: the parts of the documentation that are generated: docs/API.md and the pictures."""
