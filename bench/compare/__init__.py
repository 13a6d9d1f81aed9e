"""One workload played on the same cores in each way of serving, and a report of what each costs.

The life of a comparison: `plan` says what to play; `workload` makes requests of it, the same for
all ways; `ways` makes a cluster of each way; `probe` measures what a request takes alone and what a
long prompt does to running streams; `client` plays the workload on its schedule; `metrics` makes
numbers of the times; `verdict` and `crossover` say in words what they mean; `report` writes it all
down with `figures`. Only `run` and `client` touch clusters; the rest is pure.
"""
