"""The command line of kvloop, and the local stack that ``kvloop up`` runs.

``cli``    the commands; each imports what it needs when it runs
``chat``   a conversation in the terminal through the proxy
``stack``  valkey, a prefill and a decode worker and the proxy as one unit on this machine

Nothing here serves requests: that is ``proxy``. Nothing here knows vLLM: that is
``worker_launch``. Both are started as processes of their own.
"""

__version__ = "0.1.0"
