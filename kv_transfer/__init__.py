"""Moves KV blocks from a prefill worker's cache into a decode worker's cache.

Two halves that do not know each other: pure state machines that say who may write, what is
proven and when blocks may be freed (`plan`, `inbound`, `outbound`), and backends that
move bytes and nothing else (`backend`, `memory`, `shm`, `torch_backend`, `nixl`). Control
messages travel between the workers on a stream that this package does not own; docs/handoff.md
has the protocol on one page.
"""
