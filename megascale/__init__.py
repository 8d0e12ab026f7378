"""An open implementation of MegaScale (NSDI 2024): large language model pretraining in 3D parallelism on PyTorch."""

__version__ = "0.2.0"
