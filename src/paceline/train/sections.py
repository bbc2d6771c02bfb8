"""What sections of a recipe are made of: mappings that refuse unknown keys, and the plain types in them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# Strict: YAML has its own numbers and booleans, and `true` is not a number of steps.
Count = Annotated[int, Field(ge=1, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class Section(BaseModel):
    """A mapping of a recipe: unknown keys are refused, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenSection(Section):
    """A section that hands the keys it does not know itself to something else, which checks them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def options(self) -> dict[str, Any]:
        """The keys that go on."""
        return dict(self.model_extra or {})
