"""`answer`: the final answer, or a file in the work folder, is compared with what is right. Needs no fresh sandbox: nothing of the agent's
is run.

`exact` compares texts with outer white space off. `regex` searches. `numeric` reads numbers as people write them (`1,234.5`, `3/4`,
`-2e5`, `12.5 %`, `$1,000`, `\\frac{3}{4}`, `\\boxed{...}`) as exact fractions and compares with a tolerance.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from polar.errors import EvaluatorError, UnsafePath
from polar.evaluator.base import Evaluator, Evidence, Verdict, register

LONGEST = 20_000
"""Characters at the end of an answer that are looked at."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:[$€£]\s?)?(?:\\[dt]?frac\{{(?P<top>[-+]?\d{{1,30}})\}}\{{(?P<bottom>\d{{1,30}})\}}"
    rf"|(?P<number>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?(?:\s?/\s?(?P<over>\d{{1,30}})(?![\d.]))?)(?P<percent>\s?\\?%)?"
)
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")


Right = StrictBool | str | float | int


class AnswerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mode: Literal["exact", "regex", "numeric"] = "exact"
    expected: Right | list[Right] | None = None
    """One of them must be met; with `regex`, patterns. A truth value is the word, in whatever case."""
    expected_key: str | None = None
    """Instead of `expected`: the field of the task's metadata that holds it."""
    file: str | None = None
    """Judge this file of the agent's sandbox, relative to its work folder, instead of the final answer."""
    extract: str | None = None
    """A pattern whose last match (its first group, if any) is the answer within the text."""
    ignore_case: bool = False
    collapse_space: bool = False
    tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    relative_tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    pick: Literal["last", "first", "only", "any"] = "last"
    """Which number of the text is the answer; `only`: none but one may be there. A `\\boxed{...}` outranks the rest of the text."""
    right: float = Field(default=1.0, allow_inf_nan=False)
    wrong: float = Field(default=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _whole(self) -> AnswerConfig:
        if (self.expected is None) == (self.expected_key is None):
            raise ValueError("give expected or expected_key")
        for pattern in [self.extract] if self.extract else []:
            _compiled(pattern)
        for one in _listed(self.expected) if self.expected is not None else ():
            if self.mode == "regex":
                _compiled(str(one))
            if self.mode == "numeric" and not numbers(str(one)):
                raise ValueError(f"expected holds {one!r}, which is not a number")
        return self


@register
class Answer(Evaluator[AnswerConfig]):
    name = "answer"
    Config = AnswerConfig
    needs_fresh = False

    async def evaluate(self, evidence: Evidence) -> Verdict:
        config = self.config
        expected = self._expected(evidence)
        text = evidence.answer
        if config.file is not None:
            if evidence.agent is None:
                raise EvaluatorError("the agent's sandbox is gone, and with it the file to judge")
            try:
                text = (await evidence.agent.read(config.file, max_bytes=1 << 20)).decode(errors="replace")
            except FileNotFoundError:
                return Verdict(config.wrong, report={"reason": f"there is no file {config.file}"})
            except UnsafePath as error:
                return Verdict(config.wrong, report={"reason": f"{config.file} is not a plain file of a sensible size: {error}"})
        if text is None:
            return Verdict(config.wrong, report={"reason": "the harness gave no final answer"})
        found = self._extracted(text[-LONGEST:])
        if found is None:
            return Verdict(config.wrong, report={"reason": "the answer has nothing that the pattern matches", "answer": text[-500:]})
        right = any(self._meets(found.casefold() if isinstance(one, bool) else found, _text(one)) for one in expected)
        return Verdict(
            config.right if right else config.wrong, report={"answer": found[-500:], "expected": [_text(one) for one in expected]}
        )

    def _expected(self, evidence: Evidence) -> list[Right]:
        if self.config.expected is not None:
            return _listed(self.config.expected)
        value = evidence.metadata.get(self.config.expected_key or "")
        if value is None or (isinstance(value, list) and not value) or isinstance(value, dict):
            raise EvaluatorError(f"the task's metadata has no answer under {self.config.expected_key!r}")
        return _listed(value)

    def _extracted(self, text: str) -> str | None:
        if self.config.extract is None:
            return text
        last = None
        for match in _compiled(self.config.extract).finditer(text):
            last = match.group(1) if match.re.groups else match.group(0)
        return last

    def _meets(self, text: str, expected: str) -> bool:
        config = self.config
        if config.mode == "regex":
            return re.search(expected, text, re.IGNORECASE if config.ignore_case else 0) is not None
        if config.mode == "exact":
            return self._plain(text) == self._plain(expected)
        wanted = numbers(expected)
        if not wanted:
            raise EvaluatorError(f"the expected answer {expected!r} is not a number")
        slack = Fraction(config.tolerance) + Fraction(config.relative_tolerance) * abs(wanted[-1])
        # 50 % is 0.5, and where 50 is asked for without a sign, it is that too.
        readings = [text] if "%" in expected else [text, text.replace("%", "")]
        return any(abs(one - wanted[-1]) <= slack for reading in readings for one in self._chosen(numbers(reading)))

    def _chosen(self, found: list[Fraction]) -> list[Fraction]:
        if self.config.pick == "only" and len(set(found)) != 1:
            return []
        return found if self.config.pick == "any" else found[:1] if self.config.pick == "first" else found[-1:]

    def _plain(self, text: str) -> str:
        text = unicodedata.normalize("NFC", text).strip()
        if self.config.collapse_space:
            text = " ".join(text.split())
        return text.casefold() if self.config.ignore_case else text


def numbers(text: str) -> list[Fraction]:
    """The numbers in a text, in order; those of the last `\\boxed{...}` only, where there is one with a number."""
    text = unicodedata.normalize("NFKC", text.replace("−", "-").replace("\\!", "").replace("\\,", "")).replace("⁄", "/")
    for boxed in reversed(_BOXED.findall(text)):
        if inside := _numbers(boxed):
            return inside
    return _numbers(text)


def _numbers(text: str) -> list[Fraction]:
    found = []
    for match in _NUMBER.finditer(text):
        sign = match.group("sign")
        before = text[match.start() - 1 : match.start()]
        if sign and (before.isalnum() or before in (")", "]")):  # 5-3 is two numbers, not 5 and -3
            sign = "+"
        try:
            if match.group("top") is not None:
                value = Fraction(int(match.group("top")), int(match.group("bottom")))
            else:
                value = Fraction(Decimal(match.group("number").replace(",", "")))
                value *= Fraction(10) ** int(match.group("exponent") or 0)
                if match.group("over") is not None:
                    value /= int(match.group("over"))
        except (ZeroDivisionError, InvalidOperation, ValueError):
            continue
        if match.group("percent"):
            value /= 100
        found.append(-value if sign == "-" else value)
    return found


def _listed(value: Right | list[Right]) -> list[Right]:
    return list(value) if isinstance(value, list) else [value]


def _text(right: Right) -> str:
    return str(right).lower() if isinstance(right, bool) else str(right)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
