"""The running process of one agent."""
