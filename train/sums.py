"""What is added up over micro-batches, processes and steps, before anything is divided."""

from dataclasses import dataclass


@dataclass
class Sums:
    """Loss and counted pairs of every TTT step, packed tokens, supervised tokens, seconds of training."""

    loss_J: list[float]
    counted_J: list[float]
    tokens: float = 0.0
    supervised: float = 0.0
    seconds: float = 0.0

    @classmethod
    def zero(cls, steps: int) -> "Sums":
        """Nothing yet."""
        return cls([0.0] * steps, [0.0] * steps)

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> "Sums":
        """Inverse of ``numbers``."""
        *by_step, tokens, supervised, seconds = numbers
        steps = len(by_step) // 2
        return cls(by_step[:steps], by_step[steps:], tokens, supervised, seconds)

    def numbers(self) -> list[float]:
        """All of it as one flat list."""
        return [*self.loss_J, *self.counted_J, self.tokens, self.supervised, self.seconds]

    def __add__(self, other: "Sums") -> "Sums":
        return Sums.from_numbers([a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)])

    def loss(self, decay: float) -> float | None:
        """sum over j of decay^j * loss_J[j], divided by N_0 = counted_J[0]; None when nothing counted."""
        weighted = sum(decay**j * loss for j, loss in enumerate(self.loss_J))
        return weighted / self.counted_J[0] if self.counted_J[0] else None

    def means(self) -> list[float | None]:
        """Mean loss of the pairs of each TTT step."""
        return [loss / counted if counted else None for loss, counted in zip(self.loss_J, self.counted_J, strict=True)]
