"""Transfer between cards: what of it needs CUDA, NCCL or their doubles on a CPU.

`lane` is a link's own stream, `nccl` moves pieces through a two-rank group (`nccl_pair`), `ipc`
writes into the cache of another process of the host, whose memory `mapping` hands over. `double`
stands for NCCL and for a card's memory in tests and dry runs. Never run on a card where it was
written: docs/gpu.md.
"""
