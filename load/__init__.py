"""`kvpool bench serve`: load on a cluster, or on another engine, and what came of it.

A workload (workload.py) is sent to an engine (engine.py) at times that arrivals.py decides; load.py does the sending and notes
when each token came (sample.py); figures.py and report.py make figures of that. waste.py looks at the blocks meanwhile.
"""
