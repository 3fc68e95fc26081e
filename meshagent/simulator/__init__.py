"""A whole mesh in one process, on a virtual clock, from a seed."""
