"""The local stack: one supervisor process and the parts that it starts.

``plan``        [pure] the parts as data: command, environment, when it counts as ready
``state``       what is running now; ``state.json`` in the state folder is this and nothing else
``processes``   start, identify and stop process groups; never touches a process it cannot identify
``probes``      does a part answer?
``supervisor``  carries a plan out: start, watch, stop
``control``     what the commands do: run in front, detach, ask, stop
``render``      the state as a live table, as plain lines, as text to paste

Calls go one way: ``control -> supervisor -> processes | probes``; all of them read ``plan`` and
``state``. The supervisor alone writes ``state.json`` while it lives and holds the folder's lock,
so there is one stack per state folder.
"""
