# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.14.0", "instructor==1.17.0"]
# ///
"""instructor over the `openai` library: forced calls, JSON by schema, streams of partial objects."""

from typing import Any

import instructor
import openai
from cases import KEY, NATIVE_URL, raised, run
from instructor.core.exceptions import InstructorRetryException
from person import Person

openai_client = openai.OpenAI(base_url=f"{NATIVE_URL}/v1", api_key=KEY, max_retries=0)
FIELDS: Any = {
    "model": "default",
    "messages": [{"role": "user", "content": "Describe a person."}],
    "max_retries": 1,
}


def ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai_client, mode=mode)
    assert isinstance(client.create(**FIELDS, response_model=Person), Person)


def structured() -> None:
    ask(instructor.Mode.JSON_SCHEMA)


def forced_call() -> None:
    ask(instructor.Mode.TOOLS)
    ask(instructor.Mode.TOOLS_STRICT)


def stream() -> None:
    client = instructor.from_openai(openai_client, mode=instructor.Mode.JSON_SCHEMA)
    people = list(client.create_partial(**FIELDS, response_model=Person))
    assert len(people) > 1
    assert isinstance(people[-1].age, int)


def error() -> None:
    client = instructor.from_openai(openai_client)
    caught = raised(
        InstructorRetryException,
        lambda: client.create(**FIELDS | {"model": "nobody"}, response_model=Person),
    )
    assert isinstance(caught.__cause__, openai.NotFoundError) or "nobody" in str(caught)


if __name__ == "__main__":
    run(structured, forced_call, stream, error)
