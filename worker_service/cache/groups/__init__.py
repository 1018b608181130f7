"""The kinds of groups. A group is layers whose KV is kept in the same way, in a pool of its own.

A kind is a module here, with two classes: a `Group`, which knows what the pool is for and takes grants, and a `GroupTable`, what
one sequence has in it. The rest of the cache side goes over both and never asks for a kind; who builds the settings names it.
"""
