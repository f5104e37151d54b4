"""Near-duplicates by exact Jaccard similarity of character 5-grams, without what a whole prompt family has in common.

Prompt sets are full of templates ("Is X a food item?"): compared whole, any two prompts of a family look alike. So a shingle that
occurs in more than a tenth of its family is boilerplate and does not count; what is left is what the prompt asks. An inverted
index over the held-out shingles makes the comparison exact at a few microseconds a hundred characters, so no sketch is needed.
"""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

SHINGLE = 5
BOILERPLATE_SHARE = 0.1
SMALLEST_TEMPLATED_FAMILY = 20
FAMILY_SAMPLE = 2000
# Odd 64-bit multipliers, one a position: a shingle's hash is the sum of its code points times these, modulo 2**64.
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD)


@dataclass(frozen=True)
class Document:
    """A prompt's text and the family whose boilerplate it shares."""

    family: str
    text: str


def shingles(text: str) -> Hashes:
    """Return the sorted distinct 64-bit hashes of the character 5-grams of ``text``, case, width and spacing levelled."""
    levelled = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    points = np.frombuffer(f" {levelled} ".ljust(SHINGLE).encode("utf-32-le", "replace"), dtype=np.uint32).astype(np.uint64)
    count = len(points) - SHINGLE + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for offset, multiplier in enumerate(_MULTIPLIERS):
        hashes += points[offset : offset + count] * np.uint64(multiplier)
    return np.unique(hashes)


class Boilerplate:
    """The shingles that each family's prompts share, learned from a sample of them (the first 2,000 given)."""

    def __init__(self, documents: Iterable[Document]) -> None:
        samples: dict[str, list[Hashes]] = defaultdict(list)
        for document in documents:
            if len(samples[document.family]) < FAMILY_SAMPLE:
                samples[document.family].append(shingles(document.text))
        self._common = {family: _common(sample) for family, sample in samples.items() if len(sample) >= SMALLEST_TEMPLATED_FAMILY}

    def content(self, document: Document) -> Hashes:
        """Return the shingles of ``document`` that are its own; all of them when nothing else is left."""
        found = shingles(document.text)
        common = self._common.get(document.family)
        if common is None:
            return found
        own = np.setdiff1d(found, common, assume_unique=True)
        return own if len(own) else found


def _common(sample: list[Hashes]) -> Hashes:
    values, counts = np.unique(np.concatenate(sample), return_counts=True)
    return values[counts > BOILERPLATE_SHARE * len(sample)]


class NearDuplicates:
    """Tells whether a document's content is at least ``threshold`` similar to that of any reference document."""

    def __init__(self, references: Sequence[Document], boilerplate: Boilerplate, threshold: float) -> None:
        contents = [boilerplate.content(reference) for reference in references]
        self._boilerplate = boilerplate
        self._threshold = threshold
        self._sizes = np.array([len(content) for content in contents], dtype=np.int64)
        hashes = np.concatenate(contents) if contents else np.zeros(0, dtype=np.uint64)
        owners = np.repeat(np.arange(len(contents)), self._sizes)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._owners = hashes[order], owners[order]

    def __contains__(self, document: Document) -> bool:
        content = self._boilerplate.content(document)
        low = np.searchsorted(self._hashes, content, side="left")
        high = np.searchsorted(self._hashes, content, side="right")
        hit = high > low
        if not hit.any():
            return False
        owners = np.concatenate([self._owners[start:end] for start, end in zip(low[hit], high[hit], strict=True)])
        shared = np.bincount(owners, minlength=len(self._sizes))
        similarity = shared / (self._sizes + len(content) - shared)
        return bool(similarity.max() >= self._threshold)
