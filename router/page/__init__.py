"""The live page at /ui: what a person sees of a running cluster, in a browser."""
