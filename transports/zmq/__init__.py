"""Links over ZeroMQ with CURVE."""
