"""Which links there are, and who has proved to be at their other ends."""
