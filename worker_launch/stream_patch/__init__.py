"""What the API server adds to an answer: the handle and the token ids behind it.

``plugin`` (vLLM's entry point) wraps the generators, ``capture`` looks at what the engine returned,
``chunk`` writes the one extra event, ``import_watch`` makes the patch happen only in a process that
really imports the serving code.
"""
