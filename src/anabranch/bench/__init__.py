"""Numbers: one file a benchmark, each a command of `anabranch bench`."""
