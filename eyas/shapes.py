"""Sizes of target and drafter from their config.json alone: no weights, and no hub where the sizes are published (eyas.published).

A target opened for work is ``eyas.target.open_target``'s affair; here is what a plan needs before anything was downloaded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from eyas.config import Config
from eyas.drafter import DrafterShape
from eyas.drafter_config import build_shape, read_config
from eyas.errors import EyasError, first_line
from eyas.files import read_object
from eyas.packaged_target import smollm2_folder
from eyas.published import PUBLISHED
from eyas.target import TargetShape, shape_of

CONFIG = "config.json"
HUB_SECONDS = 10


@dataclass(frozen=True)
class Shapes:
    """Sizes of a run's models, and for each where they were read."""

    target: TargetShape
    target_from: str
    drafter: DrafterShape
    drafter_from: str
    layers: tuple[int, ...]
    """Of the aux states; those of the likeliest reading where the warm start's config leaves it open."""


def read_shapes(config: Config) -> Shapes:
    """Sizes of ``config``'s target and drafter. Raises EyasError for a model that is neither here, nor on the hub, nor published."""
    target_values, target_from = _target_config(config)
    target = shape_of(target_values, target_from)
    if config.drafter.init == "scratch":
        layers = tuple(config.prep.states.layers or (2, target.num_layers // 2, target.num_layers - 3))
        return Shapes(target, target_from, _fresh(config, target, len(layers)), "from scratch, after the target", layers)
    values, drafter_from = _drafter_config(config)
    try:
        read = read_config(values)
        shape = build_shape(read.sizes, read.draft_vocab_size or target.vocab_size, read.num_aux or 3)
    except EyasError as error:
        raise EyasError(f"{drafter_from}: {error}") from None
    changes = {
        "draft_vocab_size": config.drafter.draft_vocab_size or shape.draft_vocab_size,
        "max_position": max(shape.max_position, target.max_position),
    }
    layers = tuple(config.prep.states.layers or (read.candidates[0] if read.candidates else range(shape.num_aux)))
    return Shapes(target, target_from, shape.model_copy(update=changes), drafter_from, layers)


def _fresh(config: Config, target: TargetShape, num_aux: int) -> DrafterShape:
    return DrafterShape(
        hidden_size=target.hidden_size,
        intermediate_size=config.drafter.intermediate_size or target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=config.drafter.draft_vocab_size or target.vocab_size,
        num_aux=num_aux,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position=target.max_position,
    )


def _target_config(config: Config) -> tuple[dict[str, Any], str]:
    name = config.target.model
    folder = smollm2_folder() if name == "package:smollm2" else Path(name).expanduser()
    if folder.is_dir():
        return read_object(folder / CONFIG), name
    return _from_hub(name.removeprefix("hub:"), config.target.revision, "target.model")


def _drafter_config(config: Config) -> tuple[dict[str, Any], str]:
    name = config.drafter.init
    if not name.startswith("hub:"):
        return read_object(Path(name) / CONFIG), name
    repository, _, revision = name.removeprefix("hub:").partition("@")
    return _from_hub(repository, revision or None, "drafter.init")


def _from_hub(repository: str, revision: str | None, key: str) -> tuple[dict[str, Any], str]:
    """config.json of a hub repository, from the cache or fetched, or what is published of it; and which it is."""
    cached = try_to_load_from_cache(repository, CONFIG, revision=revision)
    if isinstance(cached, str):
        return read_object(Path(cached)), repository
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("offline (HF_HUB_OFFLINE)")
        # one request and no retries: where there is no hub, a plan need not wait for it
        url = hf_hub_url(repository, CONFIG, revision=revision)
        answer = httpx.get(url, headers=build_hf_headers(), follow_redirects=True, timeout=HUB_SECONDS)
        answer.raise_for_status()
        return answer.json(), repository
    except (OSError, ValueError, httpx.HTTPError) as error:
        if repository not in PUBLISHED:
            raise EyasError(f"{key}: {repository} is no folder, the hub does not give its config.json: {first_line(error)}") from None
        return PUBLISHED[repository], f"{repository}, sizes as published: the hub does not give its config.json"
