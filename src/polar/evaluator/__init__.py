"""Evaluators: a finished session in, a reward out.

evaluator = from_spec(task.evaluator)          # raises ConfigError at submission
verdict = await evaluator.evaluate(evidence)   # and writes report.json
"""

# Each module registers its evaluators.
from polar.evaluator import answer, command, composition, harbor, judge, python, reference, swebench, test_map
from polar.evaluator.base import Evaluator, Evidence, Fresh, Other, Verdict, make, register, registered
from polar.evaluator.composition import from_spec
from polar.evaluator.detector import Attempt, detect
from polar.evaluator.guards import History, hide_history

__all__ = [
    "Attempt",
    "Evaluator",
    "Evidence",
    "Fresh",
    "History",
    "Other",
    "Verdict",
    "answer",
    "command",
    "composition",
    "detect",
    "from_spec",
    "harbor",
    "hide_history",
    "judge",
    "make",
    "python",
    "reference",
    "register",
    "registered",
    "swebench",
    "test_map",
]
