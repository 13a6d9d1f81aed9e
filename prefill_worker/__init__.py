"""The prefill phase: reads whole prompts, builds their KV cache and pushes it to decode workers."""

import engine  # noqa: F401  (before torch is loaded: it says how OpenMP threads wait)
