"""How many workers each pool should have, decided from what was measured, and said in words.

Pure: `autoscaler.tick` takes facts, a time and a state, and returns a decision and the next state.
docs/scaling.md tells the rules.
"""
