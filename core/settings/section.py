"""What all sections of the YAML have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Section(BaseModel):
    """Frozen; a key that it does not know is an error; a sentence under each key describes it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
