"""The commit log: the one place to which every change is written first."""
