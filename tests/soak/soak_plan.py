"""What a fault test will do, as a pure function of its seed: tasks, what their agents do, faults and the moments at which they strike, and
how every session must end. Knows no process and no clock.

A moment is logical: "task 17 makes its third call" (the engine sees which), never "after two seconds". What a fault strikes besides is
left to the machine's mood, so what must come out has to be the same whatever that is:

* an agent's way of ending belongs to its task, in every attempt, so that whichever attempt is the last ends as planned;
* a fault that takes an attempt with it strikes once; the attempts of other sessions that it takes, too, are run again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["works", "gives_up", "swallows", "exits", "hangs", "goes_on", "is_killed", "dies", "says_nothing"]
"""`works`: all its turns, whatever refusals come between, exit code 0. `gives_up` ends with 1 at the first refused call, `swallows` with 0.
`exits`: with 1 after some turns. `hangs` for ever after some. `goes_on` until its turns are refused. `is_killed`: SIGKILL in the middle of
a later call, in every attempt. `dies` before its first call with 1, `says_nothing` ends without any with 0."""

FaultKind = Literal[
    "node_killed",
    "node_gone",
    "node_paused",
    "service_killed",
    "service_paused",
    "engine_refused",
    "engine_stalled",
    "harness_killed",
    "sandbox_killed",
    "disk_full_node",
    "disk_full_service",
    "link_stalled",
    "link_refused",
    "receiver_down",
    "receiver_forgetful",
]

CODES: dict[FaultKind, frozenset[str]] = {
    "node_killed": frozenset({"lease_lost"}),
    "node_gone": frozenset({"lease_lost"}),
    "node_paused": frozenset({"lease_lost"}),
    "service_killed": frozenset({"lease_lost"}),
    "service_paused": frozenset({"lease_lost"}),
    "engine_refused": frozenset({"engine"}),
    "engine_stalled": frozenset({"engine"}),
    "harness_killed": frozenset({"harness_no_call"}),
    "sandbox_killed": frozenset({"sandbox"}),
    "disk_full_node": frozenset({"store", "node", "sandbox", "evaluator", "gateway", "harness_no_call", "lease_lost"}),
    "disk_full_service": frozenset({"lease_lost"}),
    "link_stalled": frozenset({"lease_lost"}),
    "link_refused": frozenset({"lease_lost"}),
    "receiver_down": frozenset(),
    "receiver_forgetful": frozenset(),
}
"""With what an attempt that the fault took with it may end: its `error_code`."""

DISKS: frozenset[FaultKind] = frozenset({"disk_full_node", "disk_full_service"})
"""Need small disks of their own, hence root."""
EVERYWHERE: tuple[FaultKind, ...] = tuple(kind for kind in CODES if kind not in DISKS)

ATTEMPTS = 20
DOOMED_ATTEMPTS = 2
SAMPLES_IN_GROUP = 4


@dataclass(frozen=True, slots=True)
class Agent:
    """`turns` are its answered calls; `of` is what they are measured against: a full run has `turns == of`."""

    kind: Kind
    turns: int
    of: int
    dialect: Literal["openai", "anthropic"] = "openai"
    stream: bool = False

    @property
    def doomed(self) -> bool:
        """Whether no attempt can end other than by infrastructure."""
        return self.kind in ("dies", "says_nothing")

    @property
    def reward(self) -> float:
        """What the evaluator finds: the share of its turns that the agent noted in its work folder."""
        return round(self.turns / self.of, 4)


@dataclass(frozen=True, slots=True)
class Task:
    number: int
    agent: Agent
    samples: int = 1
    backend: str = "local"
    on_policy_failure: Literal["grade", "exclude"] | float = "grade"

    @property
    def name(self) -> str:
        return f"soak-{self.number}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes when the task makes its call `call` (from 1) for the first time; with `always`, each time."""

    kind: FaultKind
    task: int
    call: int
    always: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """How a session ends. `code` is left out (`None`) for infrastructure: its last attempt may have gone with any fault."""

    outcome: str
    code: str | None
    reward: float | None
    turns: int


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    tasks: tuple[Task, ...]
    faults: tuple[Fault, ...] = field(default=())

    @property
    def sessions(self) -> int:
        return sum(task.samples for task in self.tasks)

    def table(self) -> dict[str, Ended]:
        """How every session must end, by task and sample."""
        return {f"{task.name}/{sample}": ended(task) for task in self.tasks for sample in range(task.samples)}

    def codes(self, task: Task) -> frozenset[str]:
        """With what its attempts may fail: by what its agent does, or by a fault that was planned anywhere."""
        own = frozenset({"harness_no_call"}) if task.agent.doomed else frozenset[str]()
        return own.union(*(CODES[fault.kind] for fault in self.faults))


def ended(task: Task) -> Ended:
    agent = task.agent
    if agent.doomed:
        return Ended("infrastructure", None, None, 0)
    if agent.turns == agent.of:
        return Ended("graded", None, 1.0, agent.turns)
    code = {"hangs": "agent_timeout", "goes_on": "max_turns"}.get(agent.kind, "harness_exit")
    reward = {"grade": agent.reward, "exclude": None}.get(str(task.on_policy_failure), task.on_policy_failure)
    assert not isinstance(reward, str)
    return Ended("policy", code, reward, agent.turns)


_WEIGHTS: dict[Kind, int] = {
    "works": 34,
    "gives_up": 12,
    "swallows": 8,
    "exits": 14,
    "hangs": 6,
    "goes_on": 8,
    "is_killed": 8,
    "dies": 6,
    "says_nothing": 4,
}


def make(
    seed: int,
    sessions: int,
    *,
    faults: int,
    kinds: Sequence[FaultKind] = EVERYWHERE,
    backends: Sequence[str] = ("local", "bubblewrap"),
) -> Plan:
    """`faults` are those that strike more than one session or the services; every kind comes once before any comes twice."""
    chance = random.Random(f"{seed}/{sessions}/{faults}/{','.join(kinds)}/{','.join(backends)}")
    tasks: list[Task] = []
    left = sessions
    while left:
        samples = SAMPLES_IN_GROUP if left >= SAMPLES_IN_GROUP and chance.random() < 0.1 else 1
        tasks.append(_task(chance, len(tasks), samples, chance.choice(list(backends))))
        left -= samples
    planned = [Fault("harness_killed", task.number, task.agent.turns + 1, always=True) for task in tasks if task.agent.kind == "is_killed"]
    planned += _strikes(chance, tasks, faults, kinds)
    return Plan(seed, tuple(tasks), tuple(planned))


def of(agents: Iterable[Agent], *faults: Fault, backends: Sequence[str] = ("local",), samples: int = 1) -> Plan:
    """A small plan made by hand: one task an agent."""
    tasks = tuple(Task(number, agent, samples, backends[number % len(backends)]) for number, agent in enumerate(agents))
    killed = [Fault("harness_killed", task.number, task.agent.turns + 1, always=True) for task in tasks if task.agent.kind == "is_killed"]
    return Plan(0, tasks, (*killed, *faults))


def _task(chance: random.Random, number: int, samples: int, backend: str) -> Task:
    kind = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    if samples > 1 and kind == "is_killed":
        kind = "works"
    whole = chance.randint(2, 5)
    turns = whole if kind in ("works", "gives_up", "swallows") else 0 if kind in ("dies", "says_nothing") else chance.randint(1, whole - 1)
    dialect, stream = chance.choice([("openai", False), ("openai", True), ("anthropic", True)])
    agent = Agent(kind, turns, whole, dialect, stream)  # type: ignore[arg-type]
    return Task(number, agent, samples, backend, chance.choice(["grade", "grade", "exclude", -1.0]))


def _strikes(chance: random.Random, tasks: list[Task], count: int, kinds: Sequence[FaultKind]) -> list[Fault]:
    """Spread over the run, each at a call that is made for certain."""
    order: list[FaultKind] = []
    while len(order) < count:
        order += chance.sample(list(kinds), len(kinds))
    able = [task for task in tasks if task.agent.kind == "works" and task.samples == 1]
    if len(able) < count:
        raise ValueError(f"{count} faults need {count} tasks that work, and there are {len(able)}")
    width = len(able) / count
    found = []
    for at, kind in enumerate(order[:count]):
        task = able[int(at * width + chance.random() * width)]
        found.append(Fault(kind, task.number, 1 if kind == "harness_killed" else chance.randint(1, task.agent.turns)))
    return found
