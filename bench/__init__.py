"""Measures the product against peers, plain loops and the machine's limits."""
