"""Sandboxes: where an agent or an evaluator runs."""

from polar.runtime.base import ExecResult, Left, Place, Runtime, named, register, registered
from polar.runtime.spec import MountSpec, Network, RuntimeSpec, Step

__all__ = ["ExecResult", "Left", "MountSpec", "Network", "Place", "Runtime", "RuntimeSpec", "Step", "named", "register", "registered"]
