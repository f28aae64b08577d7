"""polar.yaml: strict, the environment over it, the reference's file as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.rollout.settings import find, load, overlaid, parse, shown

REFERENCE = """
rollout:
  host: 0.0.0.0
  port: 8080
  public_url: http://10.0.0.1:8080
  save_dir: /data/rollouts
  dispatch_poll_interval_seconds: 1.0
  callback_grace_seconds: 120
gateway:
  heartbeat_interval_seconds: 30
  completion_persistence: {enabled: true, max_field_bytes: 1048576, queue_size: 1024}
  nodes:
    - id: node-a
      host: 0.0.0.0
      port: 8081
      public_url: http://10.0.0.2:8081
      model_served: Qwen/Qwen3.5-4B
      inference: {engine: sglang, base_url: "http://127.0.0.1:30000"}
      max_init_workers: 8
      max_run_workers: 8
      max_postrun_workers: 8
      default_runtime: {backend: docker, image: "swebench/one:latest", network: host, kwargs: {volumes: ["/opt/node:/opt/node:ro"]}}
"""


def test_without_a_file_every_setting_has_a_default() -> None:
    config = parse({})
    assert config.rollout.port == 8080
    assert config.rollout_url == "http://127.0.0.1:8080"
    assert config.node(None).gateway_config.engines["default"].urls == ["http://127.0.0.1:8000"]


def test_the_references_topology_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "topology.yaml").write_text(REFERENCE)
    config = load(tmp_path / "topology.yaml", {})
    node = config.node("node-a")
    assert config.rollout_url == "http://10.0.0.1:8080"
    assert node.gateway_config.engines["default"].kind == "sglang"
    assert node.gateway_config.engines["default"].model == "Qwen/Qwen3.5-4B"
    assert node.default_runtime.network == "host"


def test_an_unknown_setting_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.prot: there is no such setting; is port meant\?"):
        parse({"rollout": {"prot": 1}})


def test_every_wrong_setting_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"rollout": {"port": 99999}, "gateway": {"nodes": [{"max_run_workers": 0}]}})
    assert "rollout.port" in str(caught.value)
    assert "gateway.nodes.0.max_run_workers" in str(caught.value)


def test_a_wrong_setting_of_a_nodes_gateway_is_named_by_its_place() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.nodes\.0\.gateway\.steam: there is no such setting; is stream meant"):
        parse({"gateway": {"nodes": [{"gateway": {"steam": "live"}}]}})


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two nodes are called 'a'"):
        parse({"gateway": {"nodes": [{"id": "a"}, {"id": "a"}]}})


def test_the_environment_goes_over_the_file() -> None:
    environment = {"POLAR__ROLLOUT__PORT": "9", "POLAR__GATEWAY__NODES__0__MAX_RUN_WORKERS": "7", "POLAR__ROLLOUT__COMPAT_OPEN": "true"}
    config = parse(overlaid({"rollout": {"port": 1}, "gateway": {"nodes": [{"id": "a"}]}}, environment))
    assert (config.rollout.port, config.rollout.compat_open, config.gateway.nodes[0].max_run_workers) == (9, True, 7)
    assert config.gateway.nodes[0].id == "a"


@pytest.mark.parametrize("name", ["POLAR__GATEWAY__NODES__3__PORT", "POLAR__ROLLOUT__PORT__X", "POLAR__NONSENSE"])
def test_a_variable_that_sets_nothing_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError):
        parse(overlaid({"rollout": {"port": 1}, "gateway": {"nodes": [{}]}}, {name: "1"}))


def test_the_file_is_found_by_option_variable_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find(None, {}) is None
    (tmp_path / "topology.yaml").write_text("")
    assert find(None, {}) == Path("topology.yaml")
    (tmp_path / "polar.yaml").write_text("")
    assert find(None, {}) == Path("polar.yaml")
    assert find(None, {"POLAR_TOPOLOGY": "/x"}) == Path("/x")
    assert find(Path("/y"), {"POLAR_CONFIG": "/x"}) == Path("/y")


@pytest.mark.parametrize("text", ["- 1", "{", "just words"])
def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "polar.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"polar\.yaml"):
        load(tmp_path / "polar.yaml", {})


def test_secrets_are_masked_and_nothing_else_is() -> None:
    text = str(shown(parse({"rollout": {"token": "secret-1"}, "gateway": {"nodes": [{"id": "n", "token": "secret-2"}]}})))
    assert "secret" not in text
    assert "'n'" in text


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner))
)
def test_any_yaml_gives_settings_or_a_config_error(value: object) -> None:
    try:
        parse(value if isinstance(value, dict) else {"rollout": value})
    except ConfigError:
        pass


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [*a]", "an alias"),
        ("rollout: &r {x: {y: *r}}", "an alias"),
        ("rollout: {port: " + "9" * 5000 + "}", "is not YAML"),
        ("rollout: {retention_days: .inf}", "retention_days"),
        ("gateway: {heartbeat_interval_seconds: .inf}", "heartbeat_interval_seconds"),
        ("gateway: {nodes: [{artifacts_days: .inf}]}", "artifacts_days"),
        ('gateway: {nodes: [{id: "../../x"}]}', "gateway.nodes.0.id"),
        ('gateway: {nodes: [{id: ""}]}', "gateway.nodes.0.id"),
        ("gateway: {nodes: []}", "gateway.nodes: there must be a node"),
        ("rollout: {store: 'mysql://u:secret@h/db'}", r"rollout.store: the store's URL mysql://\.\.\. is not"),
        ("gateway: {nodes: [{gateway: {store: 'sqlite:///:memory:'}}]}", "gateway.nodes.0.gateway.store: a store in memory"),
        ("rollout: {port: 8081}", "gateway.nodes.0.port: port 8081 is rollout.port, too"),
        ("gateway: {nodes: [{id: a}, {id: b}]}", "gateway.nodes.1.port: port 8081 is gateway.nodes.0.port, too"),
        ("gateway: {nodes: [{port: 9, control_port: 9}]}", "gateway.nodes.0.control_port: port 9 is gateway.nodes.0.port, too"),
        ("rollout: {compat_open: true, compat_port: 8080}", "rollout.compat_port: port 8080 is rollout.port, too"),
        ("rollout: {host: 0.0.0.0, port: 8082}", "gateway.nodes.0.control_port: port 8082 is rollout.port, too"),
    ],
)
def test_settings_that_no_node_could_be_given_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "polar.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path / "polar.yaml", {})


def test_an_alias_used_twice_is_no_circle(tmp_path: Path) -> None:
    (tmp_path / "polar.yaml").write_text(
        "gateway: {nodes: [{id: a, port: 0, inference: &i {base_url: 'http://e'}}, {id: b, inference: *i}]}"
    )
    assert [node.inference.base_url for node in load(tmp_path / "polar.yaml", {}).gateway.nodes] == ["http://e", "http://e"]


@pytest.mark.parametrize(
    "text",
    [
        "gateway: {nodes: [{id: a, port: 0}, {id: b, port: 0}]}",
        "gateway: {nodes: [{id: a, public_url: 'http://gpu-1:8082'}, {id: b, public_url: 'http://gpu-2:8082'}]}",
        "gateway: {nodes: [{id: a, host: 10.0.0.1, control_host: 10.0.0.1}, {id: b, host: 10.0.0.2, control_host: 10.0.0.2}]}",
        "rollout: {store: 'postgresql://h/db'}",
    ],
)
def test_settings_that_may_be_right_are_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "polar.yaml").write_text(text)
    load(tmp_path / "polar.yaml", {})
