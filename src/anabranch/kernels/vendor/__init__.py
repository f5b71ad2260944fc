"""Kernels that chip vendors ship: one package for each library, files named as in `ops/`."""
