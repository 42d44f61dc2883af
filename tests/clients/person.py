"""An answer in structured form."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """A person. The bounds keep the answers of a small model short."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=120)]
