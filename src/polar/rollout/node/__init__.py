"""A node: sandboxes, agents and evaluators beside a gateway; results that are never lost."""

from polar.rollout.node.node import Node
from polar.rollout.node.serve import run_node, serving_node

__all__ = ["Node", "run_node", "serving_node"]
