"""One file for each `quant_method` of config.json: NAME, `sources`, which reads the rest of the config, and KEYS, all
that this understands; of others, `source.BOOKKEEPING` alone may be set."""
