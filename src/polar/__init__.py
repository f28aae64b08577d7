"""Polar: rollouts and GRPO for language agents through their unmodified harness."""

__version__ = "0.1.0"
