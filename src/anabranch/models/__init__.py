"""Models: `config` (what a model is), one file a family in `families/`, and the decoder that all of them share."""
