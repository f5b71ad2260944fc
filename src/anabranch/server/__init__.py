"""HTTP: requests in the dialects clients speak, answers as they come. Knows the engine only by engine.client."""
