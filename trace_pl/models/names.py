"""What the name of a model stands for: a folder, a repository of the hub, or the built-in base."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from trace_pl.errors import ConfigError, one_line

BUILT_IN_BASE = "closed-web-base"
"""Name of the tiny model that ships with the package."""

_HUB_SECONDS = 5.0
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]  # of httpx or httpx2, by its version


def resolve_model(name: str) -> str:
    """Return a local folder or hub id for a model name, checked without touching a network.

    Raises:
        ConfigError: if a path does not exist or holds no model.
    """
    if name == BUILT_IN_BASE:
        return str(Path(__file__).parents[1] / "tasks" / "closed_web" / "base")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"Expected a Hugging Face model folder at '{name}', got one without config.json."
            )
        return str(path)
    looks_like_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if looks_like_hub_id:
        return name
    raise ConfigError(
        f"Expected a model folder, a hub id 'owner/name' or '{BUILT_IN_BASE}', got '{name}', which "
        "does not exist. Set `model_name` to one of these."
    )


def find_model(name: str) -> str:
    """Return where transformers and the engines load a model from: a local folder or a hub id.

    The hub is asked once, for a few seconds at most: transformers and vLLM would ask for each file,
    and repeat it for most of a minute. Without the hub, what was downloaded before is taken.

    Args:
        name: Folder, hub id or ``closed-web-base``.

    Raises:
        ConfigError: if it is neither, or the hub does not have it, or cannot be reached.
    """
    found = resolve_model(name)
    return found if Path(found).is_dir() else _on_hub(found)


@cache
def _on_hub(name: str) -> str:
    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except GatedRepoError:
        return name  # who loads it says what to agree to
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"Expected a model folder or a hub id, got '{name}', which the hub does not have or "
            "does not show to you. Correct `model_name`, or log in by `hf auth login`."
        ) from error
    except HfHubHTTPError:
        return name  # it was reached, and those who load repeat what fails
    except (_HTTPError, OSError) as error:
        config = try_to_load_from_cache(name, "config.json")
        if isinstance(config, str):
            return str(Path(config).parent)
        raise ConfigError(
            f"Expected the model '{name}' from the Hugging Face hub, got no connection to it "
            f"({one_line(error)}), and nothing of it was downloaded before. Connect to the "
            "network, or set `model_name` to a folder."
        ) from error
    return name
