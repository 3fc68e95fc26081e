"""Messages to and from each peer: numbered, acknowledged, kept once."""
