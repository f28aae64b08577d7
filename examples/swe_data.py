"""Writes the tasks of the paper's recipe as files that `polar train` reads: `python examples/swe_data.py data`.

    data/train.jsonl       SWE-Gym instances of SkyRL-v0's 293-task subset, with their images and test scripts
    data/verified.jsonl    SWE-bench Verified, 500 instances

Needs `pip install datasets` and a network. Rows that lack what grading needs are counted and left out. Names of data sets and columns are
their authors'; where one has changed, the row says what is missing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TRAIN, VERIFIED = "SumanthRH/SWE-Gym-Subset", "princeton-nlp/SWE-bench_Verified"
NEEDED = ("instance_id", "base_commit", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")
LOG_PARSER = "parse_log_pytest"
"""SWE-Gym's repositories are tested by pytest; the swebench library does not know them by name."""


def swe_gym(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row as Polar's `swebench` evaluator takes it; `None`: it lacks something. SWE-Gym's images are named after the instance, with
    `_s_` for the double underscore that Docker's names may not have."""
    if not _complete(row) or not row.get("eval_script"):
        return None
    image = f"xingyaoww/sweb.eval.x86_64.{row['instance_id'].lower().replace('__', '_s_')}:latest"
    return {"image": image, "log_parser": LOG_PARSER, **row, "split": "train"}


def verified(row: Mapping[str, Any]) -> dict[str, Any] | None:
    return {**row, "split": "held_out"} if _complete(row) else None


def _complete(row: Mapping[str, Any]) -> bool:
    return all(row.get(name) not in (None, "") for name in NEEDED)


def write(file: Path, rows: Iterable[dict[str, Any] | None]) -> None:
    found = list(rows)
    kept = [row for row in found if row is not None]
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in kept))
    print(f"{file}: {len(kept)} tasks" + (f"; {len(found) - len(kept)} left out" if len(kept) < len(found) else ""))


def main(folder: Path) -> None:
    from datasets import load_dataset

    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", map(swe_gym, load_dataset(TRAIN, split="train")))
    write(folder / "verified.jsonl", map(verified, load_dataset(VERIFIED, split="test")))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data"))
