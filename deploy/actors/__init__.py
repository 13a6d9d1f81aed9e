"""A cluster as Ray actors on the nodes of a Ray cluster.

Ray carries configurations, addresses and errors here, never a token or a KV block.
"""
