"""Routed experts as vLLM sends them: the ids of every token but the last, a base64 .npy of shape [token, layer, k]."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence


def npy_base64(routed: Sequence[Sequence[Sequence[int]]]) -> str:
    num_layers = len(routed[0]) if routed else 0
    top_k = len(routed[0][0]) if num_layers else 0
    shape = (len(routed), num_layers, top_k)
    values = array("h", (expert for token in routed for layer in token for expert in layer))
    if sys.byteorder == "big":
        values.byteswap()
    header = f"{{'descr': '<i2', 'fortran_order': False, 'shape': {shape}, }}"
    # Magic, version, length and header together end at a multiple of 64.
    padded = header + " " * (-(len(header) + 11) % 64) + "\n"
    head = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode("latin-1")
    return base64.b64encode(head + values.tobytes()).decode()
