"""Where the model is that settings name: a model that Polar knows, a folder, or a name on the Hugging Face hub. Knows no torch.

That there is none is said before anything is loaded, and soon: the hub is asked once, for one file's headers, where its loaders would ask
again and again before they give up.
"""

from __future__ import annotations

import json
from pathlib import Path

from polar.errors import ConfigError

CONFIG = "config.json"
HUB_S = 5.0
"""How long the hub may take to answer."""


def place_of(name: str) -> str:
    """The folder of a model that Polar knows by name, else what `name` is itself: a folder, or a hub name."""
    from polar.engine.models import known_models

    known = known_models()
    return str(known[name]() if name in known else Path(name).expanduser())


def is_hub_name(name: str) -> bool:
    """Whether only the hub could have it: nothing is there, and it is not written as a path."""
    path = Path(name).expanduser()
    return not (path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1)


def check_place(name: str) -> None:
    """Raises `ConfigError` for what is no model's folder, and for a hub name that the hub, or what was kept of it here, does not have."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / CONFIG).is_file():
            adapter = (path / "adapter_config.json").is_file()
            raise ConfigError(
                f"{name} holds a LoRA adapter, not a model: name the base as the model, and this folder as the adapter"
                if adapter
                else f"{name} has no config.json: it is not a model in Hugging Face's format"
            )
        return
    if path.exists():
        raise ConfigError(f"{name} is a file; a model is a folder with config.json and *.safetensors")
    if not is_hub_name(name):
        raise ConfigError(f"there is no folder {name}")
    _check_hub(name)


def _check_hub(name: str) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(name, CONFIG), str):
            get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=HUB_S)
    except HFValidationError as error:
        raise ConfigError(f"there is no folder {name}, and no model on the Hugging Face hub can be called that") from error
    except GatedRepoError as error:
        raise ConfigError(f"the Hugging Face hub gives {name} only to whom it knows: ask for it there, then `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name} is no folder here, and the Hugging Face hub has no model of that name (or a private one: `hf auth login`)"
        ) from error
    except EntryNotFoundError as error:
        raise ConfigError(f"{name} on the Hugging Face hub has no config.json: it is not a model in its format") from error
    except Exception as error:  # of whatever HTTP library its client uses: no answer, or none that helps
        raise ConfigError(not_given(name, error)) from error


def vocabulary_of(folder: Path) -> int | None:
    """How many ids the model in `folder` has; `None` where its config.json does not say."""
    try:
        facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        size = facts.get("vocab_size") or (facts.get("text_config") or {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):  # what is wrong with it is said when the model is loaded
        return None
    return size if type(size) is int else None


def not_of_the_model(number: int, vocabulary: int) -> str:
    """What is wrong with an id of a row."""
    return f"id {number} is none of the model's {vocabulary:,}: another tokenizer made it"


def not_given(name: str, error: Exception) -> str:
    """The message for a hub name that cannot be had."""
    return (
        f"{name} is no folder here, and the Hugging Face hub did not give it: {first_line(error)} "
        "Download it where there is a network (`hf download`), and name the folder"
    )


def first_line(error: Exception) -> str:
    """What an error of a library says, as one sentence."""
    said = str(error).strip()
    return (said.splitlines()[0] if said else type(error).__name__).rstrip(".") + "."
