"""Bytes from a worker to a client."""
