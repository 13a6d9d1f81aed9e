"""One model on one device: configuration, weights, paged KV cache, forward pass, sampling.

Knows nothing of requests' lives, transfers, gRPC or asyncio. `Runner` is what workers use, together
with `BlockPool`, which decides whose blocks are whose; both belong to one thread.
"""
