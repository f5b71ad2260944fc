"""Who runs next, and where its keys and values live."""
