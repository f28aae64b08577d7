"""New weights for vLLM, as of 0.32, and for `polar engine`: the development endpoints.

vLLM has them only when it was started with `VLLM_SERVER_DEV_MODE=1`, adapters only with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` and
`--enable-lora`. What it does when it reloads, and what follows for the caller:

* It takes the old weights apart before it opens the new ones. A folder that it cannot read is a 500, and the next request kills its core
  (measured, 0.32 on a CPU): every failure of `reload_weights` is an `EngineError`, after which only a restart helps.
* A tensor that the checkpoint lacks is a line in its log and nothing else. On a CPU that corrupts models with tied embeddings without a
  word; `polar.train.export` writes untied checkpoints, and `polar.train.gate` finds what is left.
* An adapter that is loaded anew from the same path keeps prefixes computed with the old one: each version has a folder of its own.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlencode

from polar.engines.http import HttpEngine
from polar.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable

DEVELOPMENT = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
ADAPTERS = "start it with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
RETRY_S = 0.1


class VllmWeights(HttpEngine):
    """The weight side of `VllmEngine`."""

    async def update_weights(self, folder: str, version: str, *, timeout_s: float = 600.0) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        try:
            await self.post("/collective_rpc", body, timeout_s=timeout_s)
        except EngineRejected as error:
            if error.status in (404, 405):
                raise ConfigError(f"{self.url} has no way to change its weights; {DEVELOPMENT}") from error
            raise ConfigError(f"{self.url} refuses the weights in {folder}: {error.message}") from error
        except EngineUnavailable as error:
            hint = f"does the path {folder} exist on its machine, with safetensors of the served model?"
            raise EngineUnavailable(
                f"{self.url} could not load {folder} ({error.message}); {hint} Restart it: its weights are undefined."
            ) from error
        await self.reset_prefix_cache()
        await self._tell_version(version)

    async def load_adapter(self, folder: str, name: str, version: str, *, timeout_s: float = 600.0) -> None:
        body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        try:
            await self.post("/v1/load_lora_adapter", body, timeout_s=timeout_s, parse=lambda raw: raw)  # it answers in plain words
        except EngineRejected as error:
            if error.status in (404, 405) and "adapter" not in error.message:
                raise ConfigError(f"{self.url} takes no adapters; {ADAPTERS}") from error
            hint = "does the path exist on its machine?" if error.status == 404 else ""
            raise ConfigError(f"{self.url} refuses the adapter in {folder}: {error.message} {hint}".rstrip()) from error
        await self.reset_prefix_cache()
        await self._tell_version(version)

    async def reset_prefix_cache(self, *, patience_s: float = 10.0) -> None:
        """vLLM says `success: false` while a request still holds blocks, an aborted one that is being put away among them."""
        deadline = time.monotonic() + patience_s
        while True:
            answer = await self.post("/reset_prefix_cache", {})
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            if time.monotonic() > deadline:
                raise EngineError(f"{self.url} does not forget its prefixes: requests are still in flight")
            await asyncio.sleep(RETRY_S)

    async def weight_version(self) -> str | None:
        try:
            answer = await self.get("/weight_info")
        except EngineRejected as error:
            if error.status in (404, 405):
                return None
            raise
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        return None if version in (None, "default") else str(version)

    async def pause(self, *, abort: bool = False, timeout_s: float = 600.0) -> bool:
        return await self.post_if_there("/pause?" + urlencode({"mode": "abort" if abort else "wait"}), {}, timeout_s=timeout_s)

    async def resume(self) -> None:
        await self.post_if_there("/resume", {})

    async def _tell_version(self, version: str) -> None:
        """A server without the endpoint (vLLM before 0.32) is believed: it has said yes to the weights."""
        await self.post_if_there("/update_weight_version", {"new_version": version})
