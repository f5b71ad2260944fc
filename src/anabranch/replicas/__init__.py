"""Several engines for one server: replicas of a model, which Ray Serve starts, watches, replaces and scales."""
