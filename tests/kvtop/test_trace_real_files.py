"""The public traces, where they lie beside the repository: all open, none has a bad row."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtop.workloads.trace import open_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="no public traces in ../shared/traces")


@pytest.mark.parametrize(
    ("name", "format", "block_size", "num_rows", "duration_s"),
    [
        ("mooncake_conversation.jsonl.gz", "mooncake", 512, 12031, 3536.999),
        ("mooncake_synthetic.jsonl.gz", "mooncake", 512, 3993, 1022.025),
        ("weka_agentic_24.jsonl.gz", "mooncake", 64, 1194, 9327.0),
        ("weka_agentic_244.jsonl.gz", "agentic", 64, 13017, 10743.0),
        ("azure_2023_code.csv", "azure", None, 8819, 3435.948056),
        ("azure_2023_conv.csv", "azure", None, 19366, 3501.721937),
        ("vidur_arxiv_summarization.csv", "vidur", None, 28257, None),
        ("sharegpt_300_lengths.csv", "sharegpt", None, 300, 29.136836),
    ],
)
def test_a_public_trace_opens_whole(name, format, block_size, num_rows, duration_s):
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"no {name} beside the repository")
    trace = open_trace(path)
    assert (trace.format, trace.block_size, trace.num_rows, trace.num_bad) == (format, block_size, num_rows, 0)
    assert trace.duration_s == (None if duration_s is None else pytest.approx(duration_s, abs=1e-9))
    assert len(trace.requests) == len(trace.file_order) == num_rows
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    if block_size is not None:
        assert all(len(r.content.block_ids) == r.num_prompt // block_size for r in trace.requests)
