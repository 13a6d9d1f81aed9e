"""`twophase chaos`: faults to order against a cluster of child processes, and what became of it."""
