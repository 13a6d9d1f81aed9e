"""Requests that wait for workers: the line, who goes first, and what is known of the workers."""
