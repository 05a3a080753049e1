"""Starting vLLM workers, and the code of ours that runs inside them.

Nouns: a ``profile`` says which flags and environment fit a kind of machine and why; the
``launcher`` runs the command that follows from it; the ``plugin`` and the ``connector`` run inside
vLLM.

Which process runs what:

==============================  ================================================================
here, before vLLM               ``profiles``, ``launcher``, ``cli``, ``models``
vLLM's API server               ``stream_patch.plugin`` wraps the answer generators
vLLM's engine (scheduler side)  ``connector.retaining_connector`` counts and limits pinned blocks
vLLM's workers                  ``connector.retaining_connector`` (transfers are vLLM's, unchanged),
                                ``cpu_tuning`` where the profile asks for it
==============================  ================================================================

Every import of a vLLM internal is in ``vllm_compat``, so a new vLLM is one file to review.
``proxy`` is never imported here: the two meet only in the wire format, whose keys on this side are
in ``transfer_keys``, and ``tests/contract`` joins them.
"""
