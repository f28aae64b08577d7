"""The data card: `README.md` in the form that Hugging Face datasets read, so that `load_dataset(FOLDER)` finds splits and types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from polar.chat import JsonObject
from polar.export.columns import COLUMNS, features
from polar.export.spec import Form

_WHAT: dict[Form, str] = {
    "rl": "Rows for reinforcement learning: token ids, loss mask, log-probabilities and reward of each trace.",
    "chat": "Conversations for supervised fine-tuning: one a row, with tools; `weight` marks the assistant messages to train.",
    "tokens": "Pre-tokenised rows for supervised fine-tuning: ids exactly as the model saw and sampled them, with labels.",
}
_TRACE = (
    "prompt_ids", "response_ids", "loss_mask", "response_logprobs", "prompt_messages", "response_messages", "tools", "finish_reason",
    "reward",
)  # fmt: skip
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10_000_000, "1M<n<10M"))
_SHOWN = 30
"""Lines of the acceptance table in the card; the manifest has all."""


def card(facts: JsonObject, *, title: str, license_name: str | None = None) -> str:
    """The card of an export with the manifest `facts`."""
    form: Form = facts["form"]
    suffix = facts["format"]
    splits = list(facts["splits"])
    head: JsonObject = {"pretty_name": title}
    if license_name is not None:
        head["license"] = license_name
    head |= {
        "size_categories": [next((name for limit, name in _SIZES if facts["rows"]["written"] < limit), "n>10M")],
        "task_categories": ["text-generation"],
        "tags": ["agents", "tool-use", "rl" if form == "rl" else "sft"],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": f"data/{split}-*.{suffix}"} for split in splits],
            }
        ],
    }
    if not (form == "rl" and suffix == "jsonl"):  # whose lines have a form of their own
        head["dataset_info"] = {"features": features(form)}
    parts = [
        "---\n" + yaml.safe_dump(head, sort_keys=False, allow_unicode=True) + "---\n",
        f"# {title}\n",
        f"{_WHAT[form]} Made by `polar export` of recorded sessions of real agent programs. `manifest.json` has every count.\n",
        "## Columns\n",
        _columns(form, suffix),
        "## What it holds\n",
        _table(
            ("split", "rows", "sessions", "tokens", "trained tokens"),
            [(s, one["rows"], one["sessions"], one["tokens"], one["trained_tokens"]) for s, one in facts["splits"].items()],
        ),
        _lengths(facts["rows"]["lengths"]),
        "## How it was chosen\n",
        _chosen(facts),
        "## Acceptance by source\n",
        _acceptance(facts["acceptance"]),
        "## What was left out\n",
        _left_out(facts),
    ]
    return "\n".join(part for part in parts if part)


def _columns(form: Form, suffix: str) -> str:
    if form == "rl" and suffix == "jsonl":
        return "Each line is a `Trace`: " + ", ".join(f"`{name}`" for name in _TRACE) + ", and `metadata` with the rest.\n"
    return _table(("column", "meaning"), [(f"`{column.name}`", column.meaning) for column in COLUMNS[form]])


def _lengths(lengths: Mapping[str, JsonObject | None]) -> str:
    lines = [
        (name, f"{one['mean']:.1f}", one["p50"], one["p90"], one["p99"], one["max"]) for name, one in lengths.items() if one is not None
    ]
    return _table(("a row's", "mean", "median", "p90", "p99", "max"), lines)


def _chosen(facts: JsonObject) -> str:
    spec = facts["spec"]
    sessions = facts["sessions"]
    lines = [
        f"{sessions['taken']:,} of {sessions['seen']:,} sessions, as rows of the builder `{spec['builder']}`, credit `{spec['credit']}`."
    ]
    if spec["min_reward"] is not None:
        lines.append(f"Rejection sampling: reward of at least {spec['min_reward']:g}.")
    if spec["best_of"] is not None:
        lines.append(f"The best {spec['best_of']} of each group by reward.")
    if spec["deduplicate"]:
        lines.append("Rows of equal content stand once.")
    if spec["splits"] or spec["known_splits"]:
        lines.append(
            f"Split by {spec['split_by']}: all sessions of one {spec['split_by']} stand in one split"
            + ("." if spec["allow_shared_prompts"] else ", and no prompt stands in two.")
        )
    if spec["unfaithful"]:
        lines.append("**Some rows are not context-faithful**: they hold sampled tokens after ids that the model did not see.")
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _acceptance(lines: list[JsonObject]) -> str:
    if not lines:
        return "No session has a reward.\n"
    shown = [(one["source"], one["accepted"], one["graded"], f"{one['share']:.1%}", f"{one['mean_reward']:.3f}") for one in lines[:_SHOWN]]
    accepted, graded = sum(one["accepted"] for one in lines), sum(one["graded"] for one in lines)
    mean = sum(one["mean_reward"] * one["graded"] for one in lines) / graded
    if len(lines) > _SHOWN:
        shown.append((f"({len(lines) - _SHOWN} more in manifest.json)", "", "", "", ""))
    shown.append(("all", accepted, graded, f"{accepted / graded:.1%}", f"{mean:.3f}"))
    return _table(("source", "accepted", "graded", "share", "mean reward"), shown)


def _left_out(facts: JsonObject) -> str:
    tokens = facts["tokens"]
    lines = [("sessions", reason, count, "") for reason, count in facts["sessions"]["refused"].items()]
    lines += [("rows", reason, count, tokens["dropped_by"].get(reason, 0)) for reason, count in facts["rows"]["dropped"].items()]
    lines += [("calls or parts of them", reason, "", count) for reason, count in tokens["ledger_by"].items()]
    total = (
        f"Of {tokens['sampled']:,} tokens that the taken sessions sampled, {tokens['exported']:,} are trained in these rows, "
        f"{tokens['dropped']:,} are in rows that were left out, {tokens['ledger']:,} were never to be trained.\n"
    )
    return (_table(("what", "why", "count", "tokens"), lines) + "\n" if lines else "") + total


def _table(head: tuple[str, ...], lines: list[tuple[Any, ...]]) -> str:
    def row(cells: tuple[Any, ...]) -> str:
        return "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else _cell(str(cell)) for cell in cells) + " |"

    return "\n".join([row(head), "|" + " --- |" * len(head), *map(row, lines)]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
