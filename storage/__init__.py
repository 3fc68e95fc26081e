"""What an agent keeps on disk."""
