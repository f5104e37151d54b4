"""Fixtures that many tests share: the real small target."""

from pathlib import Path

import pytest

from eyas.packaged_target import smollm2_folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as an ordinary HF folder, converted once from the package that ships it."""
    return smollm2_folder()
