"""The servers that the other tests here stand on: each comes up and answers."""

from __future__ import annotations

import pytest
from engine_servers import EngineServer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", ["vllm", "sglang", "llama"])
def test_a_server_answers(name: str, request: pytest.FixtureRequest) -> None:
    server: EngineServer = request.getfixturevalue(name)
    answer = server.complete("The quick brown fox jumps over the lazy dog", tokens=4)
    assert answer["choices"]
