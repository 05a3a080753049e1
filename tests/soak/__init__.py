"""``make soak``: hundreds of turns through the local stack, then a verdict.

``turns``   the load: conversations held through the proxy, as clients hold them
``stack``   a stack as ``make up`` starts it, and what its workers use of the CPU
``report``  [pure] what was seen, as numbers, a table and a verdict
"""
