"""The vocabulary that every layer shares: requests, timelines, layouts, errors, settings.

Knows nothing of torch, grpc or ray; nothing here opens a socket or starts a thread. Every other
package may import this one, and this one imports none of them.
"""
