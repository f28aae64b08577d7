"""A gateway in a process of its own, to be killed. Prints its two ports once it listens."""

from __future__ import annotations

import asyncio
import sys

from polar.gateway.config import GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import run_until_signal


def ready(gateway: Gateway) -> None:
    print(gateway.config.port, gateway.config.control_port, flush=True)


if __name__ == "__main__":
    asyncio.run(run_until_signal(GatewayConfig.model_validate_json(sys.argv[1]), ready, lambda line: None))
