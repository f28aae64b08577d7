"""What a task says of its runtime, over what its node has."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polar.runtime.spec import MountSpec, RuntimeSpec, Step

STEP = Step(type="exec", command="true")
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "backend": st.sampled_from(["local", "docker"]),
    "image": st.sampled_from([None, "python:3.12"]),
    "env": st.dictionaries(st.sampled_from("AB"), st.sampled_from("12")),
    "network": st.sampled_from(["gateway", "host", "none"]),
    "allow_internet": st.booleans(),
    "prepare": st.lists(st.just(STEP), max_size=2),
    "eval_prepare": st.none() | st.lists(st.just(STEP), max_size=2),
    "memory_mb": st.sampled_from([None, 64]),
}
specs = st.fixed_dictionaries({}, optional=FIELDS).map(RuntimeSpec.model_validate)


@given(specs, specs)
def test_what_was_said_travels_and_wins(said: RuntimeSpec, default: RuntimeSpec) -> None:
    read = RuntimeSpec.model_validate_json(said.model_dump_json())
    assert (read, read.model_fields_set) == (said, said.model_fields_set)
    whole = default.whole()
    assert RuntimeSpec.model_validate(whole.model_dump()) == whole == default
    made = said.over(whole)
    if said.names_backend:
        assert made == said
        return
    assert made.backend == whole.backend
    for name in said.model_fields_set - {"env", "prepare", "eval_prepare"}:
        assert getattr(made, name) == getattr(said, name)
    for name in set(FIELDS) - said.model_fields_set - {"eval_prepare", "allow_internet"}:
        assert getattr(made, name) == getattr(whole, name)


@given(specs)
def test_a_task_that_says_nothing_gets_the_nodes_runtime(default: RuntimeSpec) -> None:
    assert RuntimeSpec().over(default.whole()) == default


def test_preparation_mounts_and_variables_follow_the_nodes() -> None:
    default = RuntimeSpec(
        backend="docker",
        env={"A": "1", "B": "1"},
        prepare=[Step(type="exec", command="node")],
        mounts=[MountSpec(source="/n", target="/n")],
        kwargs={"volumes": ["a:b"]},
    ).whole()
    said = RuntimeSpec(
        env={"B": "2"}, prepare=[Step(type="exec", command="task")], eval_prepare=[STEP], mounts=[MountSpec(source="/t", target="/t")]
    )
    made = said.over(default)
    assert made.env == {"A": "1", "B": "2"}
    assert [step.command for step in made.prepare] == ["node", "task"]
    assert [step.command for step in made.eval_prepare or ()] == ["node", "true"]
    assert [mount.target for mount in made.mounts] == ["/n", "/t"]
    assert made.kwargs == {"volumes": ["a:b"]}


def test_one_image_and_no_more_network_than_was_asked_for() -> None:
    default = RuntimeSpec(backend="docker", build_context="/context", allow_internet=True).whole()
    made = RuntimeSpec(image="mine", network="gateway").over(default)
    assert (made.image, made.build_context, made.effective_network) == ("mine", None, "gateway")
