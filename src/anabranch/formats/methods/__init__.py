"""One file for each `quant_method` of config.json: NAME, and `sources`, which reads the rest of the config."""
