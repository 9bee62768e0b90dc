"""Workshop: builds what a lesson is played on: an engine in this process, a recorded run, or a server beside it.

Engines start paused, and everything in them is drawn from names and seeds, so that a lesson is the same every time.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

import kvtop
from allocator.config import STEP_S
from allocator.content import Request, TokenArray, TokenContent
from allocator.scripts import CancelAt
from kvtop.attachment import Attachment
from kvtop.engine_setup import DEFAULT_BLOCK_SIZE, build_engine
from kvtop.learn.lesson import EngineSpec, RequestSpec
from kvtop.runner import EngineRunner
from kvtop.sources.in_process import InProcessOperations, InProcessSource
from kvtop.workloads.draws import VOCABULARY, draw_tokens
from kvtop.workloads.load import Load, parse_workloads

if TYPE_CHECKING:
    from allocator.engine import Engine

#: Steps a real second that a resumed engine takes, unless its file says otherwise, as a factor on real time.
SPEED: Final = 0.25
#: The stream that prompts submitted by hand begin with.
_SHARED: Final = "shared"


def open_engine(spec: EngineSpec, *, threaded: bool = True) -> Attachment:
    """Build one of a lesson's engines and return the attachment to it; closing that ends it.

    Args:
        spec: The engine.
        threaded: Let it run in a thread of its own, as it does on a screen; without one it takes the steps it is
            told to and no others.

    Raises:
        KvtopError: It could not be built.
    """
    if spec.kind == "recording":
        return _open_recording(spec)
    if spec.kind == "server":
        from kvtop.learn.stand_in import open_server

        return open_server(spec, build)
    engine = build(spec)
    go_to(engine, spec.warm_steps)
    speed = spec.options.speed if spec.options.speed is not None else SPEED
    runner = EngineRunner(engine, speed=speed, paused=True, max_steps=spec.max_steps)
    source = InProcessSource(runner, name="lesson", on_close=engine.close)
    if threaded:
        source.start()
    return Attachment(source, InProcessOperations(runner))


def go_to(engine: Engine, step: int) -> None:
    """Let an engine take steps up to ``step``, or to its end."""
    while engine.step < step and engine.advance(step - engine.step):
        pass


def build(spec: EngineSpec) -> Engine:
    """Return a new engine as ``spec`` describes it, at its first step."""
    make_request = _submitted(spec.shared_prompt)
    if spec.has_workload and spec.load_blocks is not None:
        return build_engine(spec.options, requests=_load(spec, spec.load_blocks), make_request=make_request)[0]
    if spec.has_workload:
        return build_engine(spec.options, make_request=make_request)[0]
    return build_engine(spec.options, requests=_requests(spec), make_request=make_request)[0]


def _load(spec: EngineSpec, num_blocks: int) -> Load:
    """Return the spec's workload as it is made for a pool of ``num_blocks``."""
    options = spec.options
    return Load(
        parse_workloads(options.workload),
        options.seed,
        block_size=options.block_size or DEFAULT_BLOCK_SIZE,
        num_blocks=num_blocks,
        rate_scale=options.rate_scale,
        size_scale=options.size_scale,
        num_requests=options.num_requests,
    )


def _requests(spec: EngineSpec) -> Iterator[Request]:
    for request in sorted(spec.requests, key=lambda r: r.at):
        yield _request(request)


def _request(spec: RequestSpec) -> Request:
    tokens = stream(spec.label, spec.prompt + spec.output)
    if spec.like:
        tokens[: spec.common] = stream(spec.like, spec.common)
        if spec.change is not None:
            tokens[spec.change] = (tokens[spec.change] + 1) % VOCABULARY
    script = () if spec.ends is None or spec.ends == spec.prompt + spec.output else (CancelAt(spec.ends),)
    return Request(
        TokenContent(tokens), spec.prompt, spec.at * STEP_S, spec.label, spec.priority, spec.contiguous, script
    )


def _submitted(shared: int) -> Callable[[int, int, int], Request]:
    """Return what makes the requests that are submitted by hand: ``you 1``, ``you 2``, …"""
    numbers = itertools.count(1)

    def make(prompt: int, output: int, nonce: int) -> Request:
        label = f"you {next(numbers)}"
        tokens = stream(label, prompt + output)
        common = min(shared, prompt)
        tokens[:common] = stream(_SHARED, common)
        return Request(TokenContent(tokens), prompt, 0.0, label)

    return make


def stream(name: str, count: int) -> TokenArray:
    """Return the first ``count`` tokens of the stream of that name; the same every time. [count] int32"""
    rng = np.random.Generator(np.random.PCG64([zlib.crc32(name.encode()), 7]))
    return draw_tokens(rng, count)


def _open_recording(spec: EngineSpec) -> Attachment:
    """Record a run, and return the attachment to the recording."""
    from kvtop.recording.reader import Recording
    from kvtop.recording.writer import RecordOrder, record_engine
    from kvtop.sources.recorded import RecordedOperations, RecordedSource

    # The file is needed only while it is open.
    with tempfile.TemporaryDirectory(prefix="kvtop-lesson-") as folder:
        path = Path(folder) / "incident.kvr"
        order = RecordOrder(os.fspath(path), spec.record_every, kvtop.__version__)
        unrecorded = build(spec)
        go_to(unrecorded, spec.warm_steps)
        engine = record_engine(unrecorded, spec.options, order)
        try:
            go_to(engine, spec.warm_steps + spec.record_steps)
        finally:
            engine.close()
        source = RecordedSource(Recording.open(path), name="incident", paused=True)
    return Attachment(source, RecordedOperations(source))
