"""Captured graphs, for any platform that can capture. Knows sizes and buffers, not what a step computes."""
