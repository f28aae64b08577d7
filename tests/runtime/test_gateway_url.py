"""How the model API is called inside of a sandbox that shares this machine's network."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.runtime import Place, RuntimeSpec, create


@pytest.mark.parametrize(
    ("backend", "image"), [("local", None), ("bubblewrap", None), ("docker", None), ("apptainer", "docker://debian:bookworm")]
)
def test_an_address_of_ipv6_stands_in_brackets(tmp_path: Path, backend: str, image: str | None) -> None:
    """A node that listens on `::` is reached at `::1`, which is no host of a URL as it is."""
    spec = RuntimeSpec(backend=backend, network="host", image=image)
    assert create(spec, Place("box", "owner", tmp_path, ("::1", 8081))).gateway_url == "http://[::1]:8081"
    assert create(spec, Place("box", "owner", tmp_path, ("127.0.0.1", 8081))).gateway_url == "http://127.0.0.1:8081"
    with pytest.raises(ConfigError, match="no way to"):
        _ = create(spec, Place("box", "owner", tmp_path)).gateway_url
