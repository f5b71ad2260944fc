"""The reason for the house: a token leaves for a few experts and joins its row again."""
