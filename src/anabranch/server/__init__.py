"""HTTP: requests and answers in the dialects of clients. Of the engine it uses engine.client only."""
