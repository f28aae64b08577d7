"""`polar export`: data for trainers, from stored sessions."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from rich.table import Table

from polar.chat import JsonObject
from polar.cli.control import store_file, store_url
from polar.cli.output import out, say
from polar.errors import ConfigError
from polar.store import Store, open_store

BuilderOption = Annotated[str, typer.Option("--builder", help="How completions become rows: prefix_merging, per_request, or a plugin.")]
OptionOption = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the builder, NAME=VALUE with a YAML value; repeatable.")
]
CreditOption = Annotated[
    str, typer.Option("--credit", help="How a session's reward reaches its rows: broadcast, main_only, last_row or per_row.")
]
LabelsOption = Annotated[
    Path | None,
    typer.Option("--rewards", "--labels", help="JSON lines with session_id and reward (and other facts), over those of the store."),
]


def export(
    folder: Annotated[Path, typer.Argument(help="Folder to write; an interrupted export goes on in its own.")],
    form: Annotated[
        Literal["rl", "chat", "tokens"],
        typer.Option(
            "--as", help="rl: rows with log-probabilities and rewards; chat: conversations for SFT; tokens: pre-tokenised for SFT."
        ),
    ] = "chat",
    file_format: Annotated[
        Literal["parquet", "jsonl"], typer.Option("--format", help="parquet or jsonl; `datasets` loads both.")
    ] = "parquet",
    store: Annotated[str | None, typer.Option("--store", help="Path or URL of the store; default: the gateway's.")] = None,
    rewards: LabelsOption = None,
    min_reward: Annotated[float | None, typer.Option(help="Leave out sessions below it (rejection sampling).")] = None,
    best_of: Annotated[int | None, typer.Option(help="Keep at most so many of each group, the best by reward.")] = None,
    keep_unrewarded: Annotated[bool, typer.Option("--keep-unrewarded", help="Take sessions and rows without a reward, too.")] = False,
    harness: Annotated[str | None, typer.Option(help="Only sessions of this harness.")] = None,
    task: Annotated[str | None, typer.Option(help="Only sessions of this task, or of tasks like `name-*`.")] = None,
    kind: Annotated[
        Literal["train", "eval", "any"], typer.Option(help="Sessions of this kind; those of an evaluation only if asked for.")
    ] = "train",
    role: Annotated[list[str] | None, typer.Option(help="Only rows of this role (main, sub_agent, ...); repeatable.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Leave out longer rows. To cut them: --option max_length=N.")] = None,
    split: Annotated[list[str] | None, typer.Option(help="NAME=SHARE of the sessions, as in test=0.1; the rest is train.")] = None,
    split_by: Annotated[
        Literal["repository", "task", "split"],
        typer.Option(help="What stands in one split only; `split`: the splits that the tasks themselves name."),
    ] = "repository",
    splits: Annotated[Path | None, typer.Option(help="splits.jsonl of an earlier export: what it names keeps its side.")] = None,
    allow_shared_prompts: Annotated[
        bool, typer.Option("--allow-shared-prompts", help="Let several splits hold rows that begin with one prompt.")
    ] = False,
    deduplicate: Annotated[
        bool | None, typer.Option("--deduplicate/--keep-duplicates", help="Rows of equal content once. Default: not for rl.")
    ] = None,
    unfaithful: Annotated[
        bool, typer.Option("--unfaithful", help="Take rows whose tokens stand after ids that the model did not see.")
    ] = False,
    include_open: Annotated[bool, typer.Option("--include-open", help="Take sessions that have not ended.")] = False,
    builder: BuilderOption = "prefix_merging",
    option: OptionOption = None,
    credit: CreditOption = "broadcast",
    seed: Annotated[int, typer.Option(help="Of the split.")] = 0,
    part_mb: Annotated[float, typer.Option(help="Size of a file before compression; an interruption costs as much at most.")] = 64.0,
    title: Annotated[str | None, typer.Option(help="For the data card. Default: the folder's name.")] = None,
    license_name: Annotated[str | None, typer.Option("--license", help="For the data card.")] = None,
) -> None:
    """Write stored sessions as data for trainers, with a manifest and a data card. Streams; goes on after an interruption."""
    from polar.export import About, Spec
    from polar.export import export as write

    spec = Spec(
        form=form,
        file_format=file_format,
        builder=builder,
        options=builder_options(option),
        credit=credit,
        min_reward=min_reward,
        best_of=best_of,
        keep_unrewarded=keep_unrewarded,
        include_open=include_open,
        kind=kind,
        harness=harness,
        task=task,
        roles=tuple(role or ()),
        max_tokens=max_tokens,
        deduplicate=form != "rl" if deduplicate is None else deduplicate,
        unfaithful=unfaithful,
        splits=shares(split),
        split_by=split_by,
        known_splits=None if splits is None else str(splits),
        allow_shared_prompts=allow_shared_prompts,
        labels=None if rewards is None else str(rewards),
        seed=seed,
        part_mb=part_mb,
    )

    async def run() -> JsonObject:
        opened, url = stored(store)
        try:
            about = About(title or folder.resolve().name, license_name)
            return await write(opened, url, folder, spec, about=about, progress=lambda line: say(line, "dim"))
        finally:
            await opened.aclose()

    made_here = not folder.exists()
    facts = asyncio.run(run())
    show(facts, folder)
    if not facts["rows"]["written"]:
        if made_here:  # an export of nothing shall not stand in the way of the next
            shutil.rmtree(folder)
        why = "the reasons stand above" if facts["sessions"]["seen"] else "the store has no session that was asked for"
        raise ConfigError(f"nothing was exported; {why}")


def stored(given: str | None) -> tuple[Store, str]:
    """The store to read, and its place. Raises `ConfigError` where there is none: reading makes no empty one."""
    url = store_url(given)
    path = store_file(url)
    if path is not None and not path.is_file():
        raise ConfigError(f"there is no store at {path}; name one with --store")
    return open_store(url), url


def show(facts: JsonObject, folder: Path) -> None:
    sessions, tokens = facts["sessions"], facts["tokens"]
    table = Table("split", "rows", "sessions", "tokens", "trained tokens")
    for name, one in facts["splits"].items():
        table.add_row(name, *(f"{one[key]:,}" for key in ("rows", "sessions", "tokens", "trained_tokens")))
    out.print(table)
    out.print(f"{sessions['taken']:,} of {sessions['seen']:,} sessions taken", highlight=False)
    for what, counts in (("sessions", sessions["refused"]), ("rows", facts["rows"]["dropped"])):
        for reason, count in counts.items():
            out.print(f"  left out {count:,} {what}: {reason}", highlight=False)
    out.print(
        f"{tokens['exported']:,} trained tokens exported + {tokens['dropped']:,} in rows left out + {tokens['ledger']:,} in the ledger"
        f" = {tokens['sampled']:,} sampled",
        highlight=False,
    )
    if facts["rows"]["written"]:
        out.print(f"{folder}: README.md (data card), manifest.json, data/", highlight=False, soft_wrap=True)


def builder_options(given: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` pairs, values as YAML."""
    return {name: yaml.safe_load(value) for name, value in _pairs(given, "--option")}


def shares(given: list[str] | None) -> dict[str, float]:
    found = {}
    for name, value in _pairs(given, "--split"):
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--split {name}={value}: the share is a number such as 0.1") from None
    return found


def _pairs(given: list[str] | None, option: str) -> list[tuple[str, str]]:
    pairs = []
    for item in given or ():
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise ConfigError(f"{option} {item}: write NAME=VALUE")
        pairs.append((name, value))
    return pairs
