"""The fitted drafter in the embedded engine: right about the first draft always, and never again once something is mis-read."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from eval.engine import Engine
from eyas.config import TargetConfig
from eyas.folder import DrafterFolder, read_drafter
from eyas.target import open_target
from tests.fitted import Fitted, Text

STEPS = 3


def shifted(folder: DrafterFolder, by: int) -> DrafterFolder:
    return replace(folder, layers=tuple(k + by for k in folder.layers or ()))


def d2t_absolute(folder: DrafterFolder) -> DrafterFolder:
    folder.drafter.d2t.copy_(folder.drafter.draft_ids_D)
    return folder


def chunks(folder: DrafterFolder, *order: int) -> DrafterFolder:
    parts = folder.drafter.fc.weight.data.chunk(3, dim=1)
    folder.drafter.fc.weight.data = torch.cat([parts[place] for place in order], dim=1)
    return folder


FAULTS: dict[str, Callable[[DrafterFolder], DrafterFolder]] = {
    "ids one up": lambda folder: shifted(folder, 1),
    "ids one down": lambda folder: shifted(folder, -1),
    "d2t absolute": d2t_absolute,
    "d2t lost": lambda folder: (folder.drafter.d2t.zero_(), folder)[1],
    "last fc chunks swapped": lambda folder: chunks(folder, 0, 2, 1),
    "outer fc chunks swapped": lambda folder: chunks(folder, 2, 1, 0),
}


@pytest.fixture(scope="module")
def engine(fitted: Fitted) -> Engine:
    folders = {name: plant(read_drafter(fitted.folder)) for name, plant in FAULTS.items()}
    target = open_target(TargetConfig(model="package:smollm2"))
    return Engine(target, {"healthy": read_drafter(fitted.folder), **folders}, torch.float32, 256, STEPS)


def rates(engine: Engine, name: str, texts: tuple[Text, ...], tokens: int = 100) -> list[float]:
    """Share of verify steps that accept draft 1, 2 and 3, the cut-off last step of each reply aside."""
    accepted = []
    for text in texts:
        reply = text.reply_ids[:tokens]
        generation = engine.generate(text.prompt_ids, len(reply), drafter=name)
        assert generation.output_ids == reply
        accepted += generation.accepted[:-1]
    return [sum(count > draft for count in accepted) / len(accepted) for draft in range(STEPS)]


def test_the_first_draft_always_stands_and_later_ones_hardly_ever(engine: Engine, fitted: Fitted) -> None:
    first, second, third = rates(engine, "healthy", fitted.texts)
    assert first > 0.95
    assert second < 0.1
    assert third < 0.05


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_first_draft_hardly_ever_stands(engine: Engine, fitted: Fitted, fault: str) -> None:
    assert rates(engine, fault, fitted.texts[:1], tokens=14)[0] < 0.1


def test_its_draft_vocabulary_is_a_reduced_one_with_offsets_of_every_size(fitted: Fitted) -> None:
    drafter = read_drafter(fitted.folder).drafter
    assert drafter.shape.draft_vocab_size < drafter.shape.vocab_size / 100
    assert len(drafter.d2t.unique()) > 100
    assert read_drafter(fitted.folder).layers == fitted.layers == (2, 15, 27)
