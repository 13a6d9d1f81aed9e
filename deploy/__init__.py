"""Composes everything: pools of workers, the router, the model store, the command line.

The only package that imports ray.
"""
