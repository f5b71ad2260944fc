"""Anabranch on an abacus: the smallest platform that has everything. There is no such machine; it counts on the CPU."""
