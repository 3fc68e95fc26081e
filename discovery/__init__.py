"""Ways to find other agents."""
