"""The pictures of a report, as SVG that follows the reader's light or dark theme.

Each module draws one: `gaps` (ITL over time), `steps` (what each worker's device did), `lines` (the
crossover), `shares` (where the time went). Drawn by hand on `canvas`: a user of the command line
needs no plotting library, and colours are CSS variables. Pure.
"""
