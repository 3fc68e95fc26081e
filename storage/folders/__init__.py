"""The mesh folder, agents, keys, locks and settings on disk."""
