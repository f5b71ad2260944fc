"""How tiles are chosen: measured tables, the search that fills them, and a tuner for each op with tiles to choose.

`table`, `search` and `timing` know no op. `experts_tiles` (the tiles and the rule) and `experts_tables` (measured
tables) are imported by the kernels; `experts_candidates` and `experts_tuner` import the kernels and measure.
"""
