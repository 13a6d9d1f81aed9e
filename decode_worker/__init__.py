"""The decode phase: owns each request's KV cache from its reservation to its last token."""

import engine  # noqa: F401  (before torch is loaded: it says how OpenMP threads wait)
