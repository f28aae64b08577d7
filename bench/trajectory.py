"""What it costs to make rows: `prefix_merging` against a bare memcpy and a naive builder over lists, in one run on one machine.

    python bench/trajectory.py [--sessions 8] [--turns 100] [--tokens 100000] [--out FILE]

Each session has 100 calls and ends at 100,000 tokens. `plain` is one conversation whose prompts all extend each other; `agents` has two
interleaved sub-agents, a compaction, edits of the history and retries, each planted and recorded as the gateway would record it, so that
the number of rows is known: roots + breaks, exactly, or the bench fails.

Speed is in ids that the builder is given (all prompts and answers; a session of 100 turns sends its history 100 times) a second. The memcpy
copies the same arrays into memory that has been touched before. The goal: at least a twentieth of memcpy's speed. The row's cost is against
`per_request`: how many rows, and how many ids a trainer computes, as they are and padded to each session's longest row.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from polar.chat import Message, Tool
from polar.harness import Tag
from polar.records import Break, Cause, Completion, Ids, Session
from polar.trajectory import Forest, Options, PerRequest, PrefixMerging, Recipe, Trajectory

VOCABULARY = 151_000
MAIN = Recipe("bench", lambda _: Tag("main", "bench"))
TOOLS = (Tool("run", "Runs a command."),)


@dataclass
class Script:
    """A session in the making, with the number of rows that it must give."""

    session: Session
    random: np.random.Generator
    completions: list[Completion] = field(default_factory=list)
    roots: int = 0
    breaks: int = 0

    def call(self, prompt: Ids, sampled: int, messages: tuple[Message, ...], parent: int | None, broken: Break | None = None) -> Ids:
        """Records a call and returns its whole stream."""
        ids = self.random.integers(0, VOCABULARY, sampled, dtype=np.int32)
        number = len(self.completions)
        answer = Message("assistant", f"answer {number}")
        self.completions.append(
            Completion(
                session=self.session.id,
                number=number,
                status="complete",
                dialect="openai_chat",
                mode="tokens",
                messages=messages,
                answer=answer,
                finish="stop",
                parent=parent,
                tools=TOOLS,
                prompt_ids=prompt,
                sampled_ids=ids,
                broken=broken,
                delivered=True,
                logprobs=-self.random.random(sampled, dtype=np.float32),
                policy_version="7",
                sampling={"temperature": 1.0},
            )
        )
        self.roots += parent is None
        self.breaks += broken is not None
        return np.concatenate([prompt, ids])

    def new(self, count: int) -> Ids:
        return self.random.integers(0, VOCABULARY, count, dtype=np.int32)


@dataclass
class Talk:
    """One conversation of a session."""

    script: Script
    stream: Ids
    messages: tuple[Message, ...]
    last: int | None = None
    cause: Break | None = None

    def turn(self, sampled: int, observed: int) -> None:
        self.stream = self.script.call(self.stream, sampled, self.messages, self.last, self.cause)
        self.last, self.cause = len(self.script.completions) - 1, None
        self.messages = (*self.messages, self.script.completions[-1].answer, Message("tool", "seen", tool_call_id="c"))
        self.stream = np.concatenate([self.stream, self.script.new(observed)])

    def breaks(self, cause: Cause, position: int, rest: Ids) -> None:
        """The next prompt keeps `position` ids, and goes on with `rest`."""
        assert self.last is not None
        self.cause = Break(cause, self.last, position, len(self.stream) - position, "planted")
        self.stream = np.concatenate([self.stream[:position], rest])


def plain(turns: int, tokens: int, seed: int) -> Script:
    """One conversation: a prompt of 8,000 ids, then answers and observations of equal length."""
    script = Script(Session(f"plain-{seed}", b"", b""), np.random.default_rng(seed))
    first = min(8000, tokens // 4)
    each = (tokens - first) // (2 * turns)
    talk = Talk(script, script.new(first), (Message("system", "s"), Message("user", "u")))
    for _ in range(turns):
        talk.turn(each, each)
    return script


def agents(turns: int, tokens: int, seed: int) -> Script:
    """Of the turns, three fifths are the main conversation's and a fifth each of two sub-agents', interleaved. The main one is compacted
    once; every tenth of its turns one id of an earlier observation is edited; four turns are tried twice."""
    script = Script(Session(f"agents-{seed}", b"", b""), np.random.default_rng(seed))
    first = min(8000, tokens // 4)
    each = (tokens - first) // (2 * turns)
    system = script.new(first // 2)
    main = Talk(script, np.concatenate([system, script.new(first // 2)]), (Message("system", "s"), Message("user", "u")))
    subs = [Talk(script, np.concatenate([system, script.new(first // 4)]), (Message("user", f"sub {i}"),)) for i in range(2)]
    done = 0
    while len(script.completions) < turns:
        at = len(script.completions) % 5
        if at in (1, 3):
            subs[at // 2].turn(each, each)
            continue
        if done and done % 10 == 0:
            place = len(main.stream) - 5 * each // 2  # in the observation before the latest answer
            main.breaks(Cause.HISTORY_EDITED, place, np.concatenate([script.new(1), main.stream[place + 1 :]]))
        elif done == turns * 3 // 10 + 1:
            main.breaks(Cause.COMPACTION, first, script.new(2 * each))
        main.turn(each, each)
        done += 1
        if done % 15 == 0 and len(script.completions) < turns:  # the answer was not liked: the same prompt again, and on from there
            kept = script.completions[-1]
            assert kept.prompt_ids is not None
            retried = Talk(script, kept.prompt_ids, kept.messages, kept.parent)
            retried.turn(each, each)
            script.breaks += 1
            script.roots -= kept.parent is None
            main = retried
    return script


def memcpy(script: Script) -> Callable[[], object]:
    arrays = [array for one in script.completions for array in (one.prompt_ids, one.sampled_ids) if array is not None]
    target = np.zeros(sum(map(len, arrays)), np.int32)

    def run() -> None:
        at = 0
        for array in arrays:
            target[at : at + len(array)] = array
            at += len(array)

    return run


def naive(script: Script) -> Callable[[], object]:
    """The obvious builder: each open row is a list, and a prompt joins the longest one that it starts with."""
    calls = [
        (one.prompt_ids.tolist(), one.sampled_ids.tolist(), one.logprobs.tolist())
        for one in script.completions
        if one.prompt_ids is not None and one.sampled_ids is not None and one.logprobs is not None
    ]

    def run() -> list[tuple[list[int], list[int], list[float]]]:
        rows: list[tuple[list[int], list[int], list[float]]] = []
        for prompt, sampled, logprobs in calls:
            fitting = [row for row in rows if prompt[: len(row[0])] == row[0]]
            row = max(fitting, key=lambda row: len(row[0]), default=None)
            if row is None:
                row = ([], [], [])
                rows.append(row)
            new = prompt[len(row[0]) :]
            row[0].extend(new + sampled)
            row[1].extend([0] * len(new) + [1] * len(sampled))
            row[2].extend([0.0] * len(new) + logprobs)
        return rows

    return run


def merging(script: Script) -> Callable[[], Trajectory]:
    made_by = PrefixMerging(Options(abandoned_retries=True))
    return lambda: made_by.build(Forest(script.session.id, script.completions), script.session, MAIN)


def timed(run: Callable[[], object], repeats: int) -> float:
    """The least CPU time of some runs, in seconds: other programs on the machine only ever add to it."""
    run()
    times = []
    for _ in range(repeats):
        gc.collect()
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return min(times)


def peak(script: Script) -> tuple[int, int, int]:
    """Bytes: at the peak of a build, held by the finished rows, and of the session's own arrays."""
    run = merging(script)
    gc.collect()
    tracemalloc.start()
    kept = run()
    held, highest = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    given = sum(
        array.nbytes for one in script.completions for array in (one.prompt_ids, one.sampled_ids, one.logprobs) if array is not None
    )
    return highest, held, given


def measure(name: str, make: Callable[[int, int, int], Script], arguments: argparse.Namespace) -> dict[str, object]:
    scripts = [make(arguments.turns, arguments.tokens, seed) for seed in range(arguments.sessions)]
    given = sum(len(one.prompt_ids) + len(one.sampled_ids) for script in scripts for one in script.completions)  # type: ignore[arg-type]
    seconds = {way.__name__: sum(timed(way(script), 5) for script in scripts) for way in (memcpy, merging)}
    seconds["naive"] = sum(timed(naive(script), 1) for script in scripts[: arguments.naive]) * len(scripts) / arguments.naive
    merged = [merging(script)() for script in scripts]
    single = [PerRequest(Options(abandoned_retries=True)).build(Forest(s.session.id, s.completions), s.session, MAIN) for s in scripts]
    for script, trajectory in zip(scripts, merged, strict=True):
        planted = script.roots + script.breaks
        counted = (len(trajectory.traces), int(trajectory.builder["roots"]) + int(trajectory.builder["breaks"]))
        if counted != (planted, planted) or len(trajectory.drift) != script.breaks:
            raise SystemExit(f"{script.session.id}: {planted} rows are right, {counted} were made; {len(trajectory.drift)} breaks reported")
    highest, held, arrays = peak(scripts[0])
    row: dict[str, object] = {
        "sessions": name,
        "calls": sum(len(script.completions) for script in scripts),
        "ids given": given,
        "rows": sum(len(one.traces) for one in merged),
        "roots": sum(script.roots for script in scripts),
        "breaks": sum(script.breaks for script in scripts),
        "rows per_request": sum(len(one.traces) for one in single),
        "row ids": ids_of(merged),
        "row ids per_request": ids_of(single),
        "padded ids": padded(merged),
        "padded ids per_request": padded(single),
        "memcpy ids/s": given / seconds["memcpy"],
        "prefix_merging ids/s": given / seconds["merging"],
        "naive ids/s": given / seconds["naive"],
        "ms a session": seconds["merging"] / len(scripts) * 1000,
        "peak bytes": highest,
        "held bytes": held,
        "given bytes": arrays,
    }
    return row


def ids_of(trajectories: list[Trajectory]) -> int:
    return sum(len(trace) for one in trajectories for trace in one.traces)


def padded(trajectories: list[Trajectory]) -> int:
    return sum(len(one.traces) * max(len(trace) for trace in one.traces) for one in trajectories)


def show(row: dict[str, object]) -> None:
    value = {name: item for name, item in row.items() if isinstance(item, int | float)}
    print(
        f"{row['sessions']}: {value['calls']} calls, {value['ids given'] / 1e6:.1f} M ids given\n"
        f"  speed      memcpy {value['memcpy ids/s'] / 1e6:.0f} M ids/s, prefix_merging {value['prefix_merging ids/s'] / 1e6:.0f} "
        f"(1/{value['memcpy ids/s'] / value['prefix_merging ids/s']:.1f} of memcpy; goal: at least 1/20), "
        f"naive lists {value['naive ids/s'] / 1e6:.1f} ("
        f"prefix_merging is {value['prefix_merging ids/s'] / value['naive ids/s']:.0f}-fold faster); "
        f"{value['ms a session']:.1f} ms a session\n"
        f"  rows       {value['rows']} = {value['roots']} roots + {value['breaks']} breaks, per_request {value['rows per_request']} "
        f"({value['rows per_request'] / value['rows']:.1f}-fold)\n"
        f"  ids        {value['row ids'] / 1e6:.2f} M, per_request {value['row ids per_request'] / 1e6:.1f} M "
        f"({value['row ids per_request'] / value['row ids']:.1f}-fold); padded {value['padded ids'] / 1e6:.2f} M, per_request "
        f"{value['padded ids per_request'] / 1e6:.1f} M ({value['padded ids per_request'] / value['padded ids']:.1f}-fold)\n"
        f"  memory     a session: peak {value['peak bytes'] / 1e6:.1f} MB, rows hold {value['held bytes'] / 1e6:.1f} MB, "
        f"its completions {value['given bytes'] / 1e6:.1f} MB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--naive", type=int, default=2, help="sessions that the naive builder is measured on")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.naive = min(arguments.naive, arguments.sessions)
    rows = [measure(name, make, arguments) for name, make in (("plain", plain), ("agents", agents))]
    for row in rows:
        show(row)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
