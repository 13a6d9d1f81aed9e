"""The cluster on a manual clock: what a configuration would do with a trace.

Placement, the fair line, admission, both schedulers, the meters and the autoscaler are the
product's own code; only devices, links and starts are models, fitted to measurements (`machine`).
"""
