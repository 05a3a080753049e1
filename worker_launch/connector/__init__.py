"""What the engine adds to NIXL transfers: a limit and a lease for pinned blocks, and exact counts.

``retaining_connector`` is the vLLM class and decides nothing; ``pin_decision`` decides,
``held_blocks`` counts, ``connector_stats`` carries the counts to ``/metrics``.
"""
