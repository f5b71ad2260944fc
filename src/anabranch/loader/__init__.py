"""Weights from disk to device. Headers are read first; what cannot work is refused before the big load."""
