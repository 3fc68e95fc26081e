"""The version, where both the build and the program can read it without importing the rest."""

__version__ = "0.1.0"
