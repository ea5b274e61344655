"""OpenAI's SDK, whole and asynchronous, in front of the module's service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.support.services import Service


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.base_url, api_key="sk-upstream", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=service.base_url, api_key="sk-upstream", max_retries=0) as made:
        yield made
