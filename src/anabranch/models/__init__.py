"""One file per family, named as `model_type` in config.json; `config` reads configs, `decoder` is what all share."""
