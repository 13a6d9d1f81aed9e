"""One model on one device: configuration, weights, paged KV cache, forward pass, sampling.

Knows nothing of requests' lives, transfers, gRPC or asyncio. `Runner` is what workers use, together
with `BlockPool`, which decides whose blocks are whose; both belong to one thread.
"""

import os

# Read by OpenMP when torch is loaded. Threads that spin at a barrier collapse when anything else
# takes one of their cores (measured: a decode step of 2 threads on 2 cores beside one busy
# process takes 2.0 s spinning, 0.1 s sleeping).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
