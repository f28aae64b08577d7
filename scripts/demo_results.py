"""Runs `polar demo` for several seeds and the control, and writes what came of them into docs/results.md: make results

    python scripts/demo_results.py [--seeds 0 1 2] [--runs runs/results] [--steps N] [--only-write]

A run whose `summary.json` is there is not made again. Everything on the page between the two marks is made of the summaries alone; what
stands around it is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results.md"
BEGIN, END = "<!-- polar demo: begin -->", "<!-- polar demo: end -->"
TITLES = {"codex": "Codex", "pi": "Pi"}
HEAD = "# Results\n\nMeasured, by the scripts named beside each table.\n"


@dataclass(frozen=True)
class Run:
    """One run of the demo; `control`: with shuffled rewards."""

    seed: int
    control: bool

    @property
    def name(self) -> str:
        return f"seed-{self.seed}{'-shuffled' if self.control else ''}"

    @property
    def title(self) -> str:
        return f"{self.seed}, shuffled rewards" if self.control else str(self.seed)


def make(run: Run, folder: Path, steps: int | None) -> None:
    """Runs it into `folder / run.name`, if it has not been made yet."""
    output = folder / run.name
    if (output / "summary.json").is_file():
        return
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "polar.cli", "demo", "--seed", str(run.seed), "--output", str(output)]
    command += ["--shuffle-rewards"] if run.control else []
    command += [] if steps is None else ["--steps", str(steps)]
    subprocess.run(command, check=True)


def page(summaries: Sequence[tuple[Run, dict[str, Any]]]) -> str:
    """The part of the page between the marks."""
    any_side = next(iter(summaries[0][1]["sides"].values()))
    first = summaries[0][1]
    versions = ", ".join(f"{TITLES[name]} {version}" for name, version in first["versions"].items())
    lines = [
        BEGIN,
        "## The demo: a protocol learned through the real CLI",
        "",
        f"`make results` on {os.cpu_count()} CPU cores ({platform.machine()}), {versions}. The bundled 2-million-parameter model knows",
        "Pi's action protocol and speaks Codex's in about one session of five. GRPO runs under both, as many groups under either; pass@1",
        f"is on {any_side['before']['tasks']} held-out tasks",
        "a harness and side, one session each, with 95% intervals (changes are paired by task).",
        "",
        "| seed | harness | before | after | change, points | steps | training sessions | s |",
        "|---|---|---|---|---|---:|---:|---:|",
    ]
    for run, summary in summaries:
        for name, side in summary["sides"].items():
            cells = [run.title, TITLES[name], _share(side["before"]), _share(side["after"]), _points(side["change"])]
            cells += [str(summary["steps"]), str(summary["sessions"]), f"{summary['seconds']:.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *_kinds(summaries), "", *_curve(summaries), "", *_agreement(summaries), END, ""]
    return "\n".join(lines)


def _share(estimate: dict[str, Any]) -> str:
    return f"{estimate['mean']:.1%} [{estimate['low']:.1%}, {estimate['high']:.1%}]"


def _points(change: dict[str, Any]) -> str:
    return f"{100 * change['mean']:+.1f} [{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]"


def _kinds(summaries: Sequence[tuple[Run, dict[str, Any]]]) -> list[str]:
    """Where the change came from, under the harness that is trained."""
    names = [name for name in summaries[0][1]["sides"]["codex"]["kinds_before"] if name != "no outcome"]
    lines = [
        "What became of the sessions under Codex, before → after:",
        "",
        "| seed | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for run, summary in summaries:
        side = summary["sides"]["codex"]
        cells = [f"{side['kinds_before'].get(name, 0)} → {side['kinds_after'].get(name, 0)}" for name in names]
        lines.append("| " + " | ".join([run.title, *cells]) + " |")
    return lines


def _curve(summaries: Sequence[tuple[Run, dict[str, Any]]]) -> list[str]:
    steps = max(len(summary["curve"]) for _, summary in summaries)
    head = " | ".join(str(step + 1) for step in range(steps))
    lines = ["Share of the training sessions under Codex that passed, by step:", "", f"| seed | {head} |", "|---|" + "---:|" * steps]
    for run, summary in summaries:
        cells = [f"{share:.0%}" for share in summary["curve"]]
        lines.append("| " + " | ".join([run.title, *cells, *[""] * (steps - len(cells))]) + " |")
    return lines


def _agreement(summaries: Sequence[tuple[Run, dict[str, Any]]]) -> list[str]:
    lines = [
        "Recorded against recomputed log-probabilities (nats; the largest of all steps), and every sampled token of the training:",
        "",
        "| seed | mean difference | 99.9th percentile | sampled | in rows | ledger | trained | stale | groups that agree |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run, summary in summaries:
        tokens = summary["tokens"]
        cells = [run.title, f"{summary['gate_mean']:.1e}", f"{summary['gate_largest']:.1e}"]
        cells += [f"{tokens[name]:,}" for name in ("sampled", "in_rows", "ledger", "stepped", "stale", "dropped")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def written(text: str, part: str) -> str:
    """`text` with what stands between the marks replaced, or `part` put at its end."""
    if BEGIN in text and END in text:
        before, rest = text.split(BEGIN, 1)
        return before + part.rstrip("\n") + rest.split(END, 1)[1]
    return (text or HEAD).rstrip("\n") + "\n\n" + part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control", type=int, default=0, help="seed of the run with shuffled rewards")
    parser.add_argument("--runs", type=Path, default=Path("runs/results"))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only-write", action="store_true", help="write the page from the runs that are there")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    runs = [Run(seed, False) for seed in options.seeds] + [Run(options.control, True)]
    if not options.only_write:
        for run in runs:
            make(run, options.runs, options.steps)
    found = [(run, options.runs / run.name / "summary.json") for run in runs]
    summaries = [(run, json.loads(path.read_text())) for run, path in found if path.is_file()]
    if not summaries:
        raise SystemExit(f"there is no run in {options.runs}")
    text = options.page.read_text(encoding="utf-8") if options.page.is_file() else ""
    options.page.write_text(written(text, page(summaries)), encoding="utf-8")
    print(f"written: {options.page}")


if __name__ == "__main__":
    main()
