"""Real servers shared by the tests of a session; whoever changes one lastingly starts one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_servers import EngineServer, llama_server, sglang_server, vllm_server
from published import own_directories


@pytest.fixture(scope="session", autouse=True)
def _own_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let published engines lie in a directory of these tests, which the servers inherit."""
    with pytest.MonkeyPatch.context() as patch:
        own_directories(patch, tmp_path_factory.mktemp("e"))
        yield


@pytest.fixture(scope="session")
def servers_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers put their logs."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def vllm(servers_dir: Path) -> Iterator[EngineServer]:
    """A vLLM server that tells of its cache and publishes its block pool as ``vllm``."""
    with vllm_server(servers_dir, publish="vllm", events=True) as server:
        yield server


@pytest.fixture(scope="session")
def sglang(servers_dir: Path) -> Iterator[EngineServer]:
    """An SGLang server that tells of its cache and publishes its pool as ``sglang``."""
    with sglang_server(servers_dir, publish="sglang") as server:
        yield server


@pytest.fixture(scope="session")
def llama(servers_dir: Path) -> Iterator[EngineServer]:
    """A llama.cpp server."""
    with llama_server(servers_dir) as server:
        yield server
