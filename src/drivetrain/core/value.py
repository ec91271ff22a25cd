"""The base of every value that travels between stages: frozen, and the same after a trip through JSON."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A frozen record. Equality is by content; an unknown key is an error, so that a typo cannot be lost in a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)


PrecisionName = Literal["fp32", "tf32", "fp16", "bf16"]
"""The number formats in which a model computes."""
