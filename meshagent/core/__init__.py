"""The protocol, pure: no clock, no socket, no disk."""
