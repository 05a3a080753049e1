"""``kvloop doctor``: is this deployment as the proxy needs it, and if not, what mends it?

``facts`` says what can be known of workers, proxy, Redis and this node; ``gather`` and ``probe``
ask for it; ``checks`` turns facts into findings and reads nothing itself; ``report`` prints them.
"""
