"""Experiment trackers through accelerate: wandb (offline unless logged in) and tensorboard. log.jsonl is written in any case."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from netrc import netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from accelerate import Accelerator

from eyas.config import Config
from eyas.errors import EyasError

PACKAGES = {"wandb": ("wandb", "pip install 'eyas[wandb]'"), "tensorboard": ("tensorboard", "pip install tensorboard")}


def check_trackers(trackers: Sequence[str]) -> None:
    """Raise EyasError when a tracker's package is not installed."""
    for tracker in trackers:
        package, command = PACKAGES[tracker]
        if find_spec(package) is None:
            raise EyasError(f"train.trackers: {tracker} is not installed; {command}, or remove it from the list")


def start_trackers(accelerator: Accelerator, trackers: Sequence[str], config: Config) -> None:
    """Open the accelerator's trackers on the main process; the config goes along as flat key -> value."""
    options: dict[str, Any] = {}
    if "wandb" in trackers:
        options["wandb"] = {"name": config.output.name, "dir": str(config.folder("train")), "mode": _wandb_mode()}
    accelerator.init_trackers("eyas", config=dict(_flat(config.model_dump(mode="json"))), init_kwargs=options)


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a log record as flat key -> value."""
    return {key: value for key, value in _flat(record) if isinstance(value, int | float) and not isinstance(value, bool)}


def _wandb_mode() -> str:
    """WANDB_MODE if set; else online only where wandb itself would find a key (environment or netrc), for it would ask otherwise."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    logins = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    logged_in = "WANDB_API_KEY" in os.environ or (logins.is_file() and netrc(logins).authenticators(host) is not None)
    return "online" if logged_in else "offline"


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, child in value.items():
        name = f"{prefix}{key}"
        if isinstance(child, list | tuple):
            child = dict(enumerate(child))
        if isinstance(child, dict):
            items += _flat(child, f"{name}/")
        else:
            items.append((name, child if isinstance(child, int | float | str | bool) else str(child)))
    return items
