"""Evaluators: a finished session in, a reward out."""

from polar.evaluator.base import Evaluator, Evidence, Verdict, make, register, registered

__all__ = ["Evaluator", "Evidence", "Verdict", "make", "register", "registered"]
