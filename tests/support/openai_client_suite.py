"""The official `openai` client against whole deployments, whatever computes their answers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest
from tests.conftest import Deployment

HI = [{"role": "user", "content": "the quick brown fox"}]
TEXT = "by text"
"""End of the names of deployments before servers whose tokenizer is not at hand."""


class OpenAIClientSuite:
    """Runs in a class of tests with a fixture `deployment`, whose parameter is a name. Its model is
    served as `tiny`."""

    @pytest.fixture
    def server(self, request: pytest.FixtureRequest, deployment: Deployment) -> str:
        """The parameter of the fixture `deployment`."""
        del deployment
        return str(request.node.callspec.params["deployment"])

    @pytest.fixture
    def client(self, deployment: Deployment) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=deployment.url + "/v1", api_key="any", max_retries=0) as client:
            yield client

    def test_chat(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="tiny", messages=HI, temperature=0, max_tokens=12
        )
        assert answer.object == "chat.completion"
        assert answer.model == "tiny"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12

    def test_a_stream_is_the_unary_text_with_an_event_per_token(
        self, client: openai.OpenAI
    ) -> None:
        whole = client.chat.completions.create(
            model="tiny", messages=HI, temperature=0, max_tokens=20
        )
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=HI,
                temperature=0,
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        texts = [
            c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content
        ]
        assert len(texts) == 20
        assert "".join(texts) == whole.choices[0].message.content
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 20

    def test_choices_differ_and_are_complete(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="tiny", messages=HI, temperature=0, max_tokens=5, n=3
        )
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 15

    def test_stop_string_is_never_part_of_the_text(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(
            model="tiny", messages=HI, temperature=0, max_tokens=40
        )
        text = whole.choices[0].message.content or ""
        stop = text[10:14]
        cut = client.chat.completions.create(
            model="tiny", messages=HI, temperature=0, max_tokens=40, stop=[stop]
        )
        assert cut.choices[0].message.content == text[: text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"

    def test_logprobs(self, client: openai.OpenAI, server: str) -> None:
        if server == "frontend by tokens":  # its completions name no token ids
            with pytest.raises(openai.BadRequestError, match="supports: logprobs"):
                client.chat.completions.create(model="tiny", messages=HI, logprobs=True)
            return
        answer = client.chat.completions.create(
            model="tiny", messages=HI, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 4
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
        joined = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
        assert joined.decode() == answer.choices[0].message.content

    def test_completions_of_text_list_and_tokens(self, client: openai.OpenAI, server: str) -> None:
        single = client.completions.create(
            model="tiny", prompt="a lazy dog", temperature=0, max_tokens=6
        )
        many = client.completions.create(
            model="tiny", prompt=["a lazy dog", "the fox"], temperature=0, max_tokens=6
        )
        assert single.choices[0].text == many.choices[0].text
        assert [c.index for c in many.choices] == [0, 1]
        if server.endswith(TEXT):
            with pytest.raises(openai.BadRequestError, match="tokenizer"):
                client.completions.create(model="tiny", prompt=[300, 301, 302], max_tokens=6)
            return
        ids = client.completions.create(model="tiny", prompt=[300, 301, 302], max_tokens=6)
        assert ids.usage is not None
        assert ids.usage.prompt_tokens == 3

    def test_models(self, client: openai.OpenAI) -> None:
        listed = client.models.list().data
        assert [m.id for m in listed] == ["tiny"]
        assert client.models.retrieve("tiny").object == "model"

    def test_default_is_an_alias(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="default", messages=HI, temperature=0, max_tokens=1
        )
        assert answer.choices[0].message.content

    def test_the_error_of_an_unknown_model_names_existing_ones(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="nobody", messages=HI)
        assert "tiny" in str(caught.value)
        assert caught.value.code == "model_not_found"
        assert caught.value.request_id

    def test_bad_values_are_400(self, client: openai.OpenAI) -> None:
        for wrong in ({"temperature": 9}, {"max_tokens": -1}, {"n": 0}, {"top_p": 2}, {"stop": ""}):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model="tiny", messages=HI, extra_body=wrong)

    def test_prompt_beyond_the_context(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="the fox " * 9000, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"

    def test_closing_a_stream_frees_the_engine(
        self, client: openai.OpenAI, deployment: Deployment, server: str
    ) -> None:
        most = 200 if server.startswith(("llama", "vllm")) else 7000
        stream = client.chat.completions.create(
            model="tiny", messages=HI, temperature=0, max_tokens=most, stream=True
        )
        next(iter(stream))
        stream.close()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if '"active_requests":0' in deployment.get("/health")[1].replace(" ", ""):
                return
            time.sleep(0.05)
        pytest.fail("the request is still active")
