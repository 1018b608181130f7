"""`kvpool bench serve`: puts load on a cluster, or on another engine, and measures it.

load.py sends a workload (workload.py) to an engine (engine.py) at times that arrivals.py decides, and notes when each token came
(sample.py). figures.py and report.py compute and print the figures. waste.py looks at the blocks meanwhile.
"""
