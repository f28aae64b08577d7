"""Tasks: what a harness is asked to do, and how it is told whether it did.

`find` reads them (bundled sets, Harbor folders, JSON lines, SWE-bench instances), `to_request` makes one what the rollout service takes,
`validate` shows that a task can be solved and is not solved by doing nothing. `files` makes the small file tasks of the demo.
"""

from polar.errors import EvaluatorError
from polar.tasks.harbor import Grade, Task, bundled, grade, load, load_all, prepare, solve
from polar.tasks.instances import Instance
from polar.tasks.lines import Line
from polar.tasks.oracle import noop_agent, oracle_agent
from polar.tasks.request import AnyTask, to_request
from polar.tasks.sets import SETS, TaskSet, find

__all__ = [
    "SETS",
    "AnyTask",
    "EvaluatorError",
    "Grade",
    "Instance",
    "Line",
    "Task",
    "TaskSet",
    "bundled",
    "find",
    "grade",
    "load",
    "load_all",
    "noop_agent",
    "oracle_agent",
    "prepare",
    "solve",
    "to_request",
]
