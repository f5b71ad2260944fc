"""Anabranch: an inference and serving engine for Mixture-of-Experts language models.

Importing this package is cheap on purpose: nothing here imports torch.
"""

__version__ = "0.1.0.dev0"
