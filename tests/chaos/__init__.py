"""Parts of the serving path die, hang and come back under load; every answer is judged.

``worker``   a scripted worker that can misbehave in every way, and whose answer depends on its KV
``link``     the way to Redis: cut, slow, silent, or led to another server
``replica``  proxy processes
``load``     conversations whose right answers are known, and clients that leave
``leaks``    what a fault left behind: running requests, pins, claims, connections, tasks
``faults``   the faults, by name
``rounds``   load under one fault, then the count: a row of the table
``report``   the table and the verdict
``pair``     the same on two real workers; ``wedge``: 500 requests on a decode with 24 blocks

``python -m tests.chaos`` runs it (``make chaos``).
"""
