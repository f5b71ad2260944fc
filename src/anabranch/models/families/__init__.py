"""One file a family, named as `model_type` in config.json, each with a `FAMILY`; torch classes are in `NAME_layer`."""
