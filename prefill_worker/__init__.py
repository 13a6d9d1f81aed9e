"""The prefill phase: reads whole prompts, builds their KV cache and pushes it to decode workers."""
