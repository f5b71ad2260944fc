"""A second Runner: the whole model in MLX, through mlx_lm. MLX arrays are not torch tensors: a room, not an `if`."""
