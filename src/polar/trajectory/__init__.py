"""From completions to training rows: forest, builders, ledger, drift report, credit, validation. Pure: no I/O, no store, no trainer.

forest = Forest(session.id)
forest.add(completion)                              # each of them, in any order
trajectory = builder("prefix_merging").build(forest, session)
trajectory = credit(trajectory, reward=1.0)         # rows with their rewards
"""

from polar.trajectory.builders import Builder, PerRequest, PrefixMerging, Rows, build, builder, check
from polar.trajectory.credit import Group, advantages, credit, groups
from polar.trajectory.drift import DriftLine, DriftTotal, aggregate
from polar.trajectory.forest import Forest
from polar.trajectory.ledger import ConservationError, FaithfulnessError, LawBroken, Ledger, Line, Reason
from polar.trajectory.row import Span, Trace, Trajectory
from polar.trajectory.selection import Options
from polar.trajectory.tags import Recipe, recipe
from polar.trajectory.validate import Problem, validate

__all__ = [
    "Builder",
    "ConservationError",
    "DriftLine",
    "DriftTotal",
    "FaithfulnessError",
    "Forest",
    "Group",
    "LawBroken",
    "Ledger",
    "Line",
    "Options",
    "PerRequest",
    "PrefixMerging",
    "Problem",
    "Reason",
    "Recipe",
    "Rows",
    "Span",
    "Trace",
    "Trajectory",
    "advantages",
    "aggregate",
    "build",
    "builder",
    "check",
    "credit",
    "groups",
    "recipe",
    "validate",
]
