"""The proxy: a turn of a conversation comes in, its KV cache is found again, the answer goes out.

Nouns, in the order in which a turn meets them:

``api``      parses and checks a request, and shapes errors for the client
``session``  who is talking (``identity``), which tokens a worker holds (``fingerprint``,
             ``holding``), the table in Redis that says so (``table``) and how much that is on
             each worker (``ledger``)
``turn``     decides what to do with the turn (``planner`` makes a ``plan``), writes the workers'
             request bodies (``wire``) and carries the plan out (``conductor``)
``relay``    the worker's event stream, cut at any byte (``sse``)
``workers``  prefill and decode workers: who may serve (``pool``), how to call one (``client``),
             whether it is alive (``health``)

``retention`` values what decode keeps after a turn; ``turn/retaining`` gives up the least.

Calls go one way: ``api -> turn -> session | relay | workers``. The proxy moves metadata only;
KV blocks travel between workers over NIXL.

Files whose first docstring line says ``[pure]`` decide and do no I/O: they import neither aiohttp,
redis, fastapi, asyncio nor each other's ``[io]`` partners, and a test holds them to that.
``worker_launch`` is never imported here: the two meet only in the wire format, and
``tests/contract`` joins them.
"""

__version__ = "0.1.0"
