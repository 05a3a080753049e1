"""``kvloop advise``: reads traffic and says whether reuse pays, and with which settings.

``traffic`` and ``logs`` make turns of what there is, ``model`` knows what KV weighs and computing
costs, ``replay`` plays the turns against a lease and a cache, ``fit`` holds the cost model against
measured runs, ``advice`` weighs it all up, ``report`` says it. Everything but ``commands`` is pure.
"""
