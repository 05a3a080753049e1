"""Which conversation a turn belongs to, and which worker still holds KV blocks for it."""
