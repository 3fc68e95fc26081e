"""A brokerless peer-to-peer mesh for coding agents."""

from meshagent._version import __version__

__all__ = ["__version__"]
