"""``kvloop bench``: one workload against several ways of serving it, interleaved in one run.

``legs`` says what can be compared, ``workloads`` what is asked, ``runner`` in which order,
``client`` times one turn, ``observe`` reads the workers' counters, ``deployment`` starts what has
to be started. A run ends as one JSON file (``records``); ``summary`` makes numbers of it and
``report`` a page, now or later, of one run or of several.
"""
