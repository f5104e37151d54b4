"""Fixtures that many tests share: the real small target."""

import signal
from pathlib import Path

import pytest

from eyas.config import TargetConfig
from eyas.packaged_target import smollm2_folder
from eyas.target import open_target
from tests.fitted import Fitted, fitted_drafter
from tests.kimi import write_tiny_kimi

# Started in a shell's background, tests would pass "ignore Ctrl-C" on to the commands that they interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as an ordinary HF folder, converted once from the package that ships it."""
    return smollm2_folder()


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """A drafter for SmolLM2 that is right about the first draft always and about later ones never, on texts that it comes with."""
    return fitted_drafter(tmp_path_factory.mktemp("fitted"), open_target(TargetConfig(model="package:smollm2")))


@pytest.fixture(scope="session")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Kimi-K2.5 in the published layout."""
    return write_tiny_kimi(tmp_path_factory.mktemp("kimi") / "tiny-kimi-k2.5")
