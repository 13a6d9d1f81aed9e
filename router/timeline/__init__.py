"""The events of each request, and how they are told."""
