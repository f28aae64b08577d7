"""Tasks: what a harness is asked to do, and how it is told whether it did.

`harbor` reads Harbor folders and grades them; `files` makes the small file tasks that are bundled.
"""

from polar.errors import EvaluatorError
from polar.tasks.harbor import Grade, Task, bundled, grade, load, load_all, prepare, solve

__all__ = ["EvaluatorError", "Grade", "Task", "bundled", "grade", "load", "load_all", "prepare", "solve"]
