"""What the router tells of itself on /metrics: measured as it happens, or looked up when asked."""
