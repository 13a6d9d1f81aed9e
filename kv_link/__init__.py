"""The sending end of KV links: for whoever has a KV cache that a decode worker is to get.

Joins what moves bytes and decides (`kv_transfer`) with the stream that control messages travel on
(`twophase.peer`). The receiving end is `decode_worker/link`; docs/handoff.md has the protocol.
"""
