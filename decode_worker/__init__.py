"""The decode phase: owns each request's KV cache from its reservation to its last token."""
