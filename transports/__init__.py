"""Ways to carry frames between agents."""
