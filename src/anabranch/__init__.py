"""Anabranch: an inference and serving engine for Mixture-of-Experts language models.

Importing this package is cheap on purpose: nothing here imports torch.
"""

import warnings

# torch's word where numpy is missing, at every start of every process. Nothing but the MLX runner needs it.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

__version__ = "0.1.0"
