"""HTTP surface: the generating routes (plain ASGI, the hot path) and the operating ones."""
