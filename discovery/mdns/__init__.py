"""Finding agents on the local network by multicast DNS."""
