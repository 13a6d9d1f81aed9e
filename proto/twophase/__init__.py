"""The wire: messages, their conversion to core types, and the clients.

Generated modules live in `twophase.v1`; `twophase.client` is the public Python client.
"""
