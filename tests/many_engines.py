"""ManyEngines: fake inference servers of every kind on one port, a path each, as a Prometheus scrapes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VLLM = """\
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="1001"}} 1.0
vllm:kv_cache_usage_perc{{engine="0",model_name="llama"}} {usage}
vllm:num_requests_running{{engine="0",model_name="llama"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="llama"}} {waiting}
vllm:prefix_cache_queries_total{{engine="0",model_name="llama"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="llama"}} {hits}
vllm:num_preemptions_total{{engine="0",model_name="llama"}} {preemptions}
vllm:iteration_tokens_total_bucket{{engine="0",le="1.0",model_name="llama"}} 7.0
python_info{{version="3"}} 1.0
"""
SGLANG = """\
sglang:token_usage{{model_name="qwen",tp_rank="0"}} {usage}
sglang:num_running_reqs{{model_name="qwen",tp_rank="0"}} {running}
sglang:num_queue_reqs{{model_name="qwen",tp_rank="0"}} {waiting}
sglang:cache_hit_rate{{model_name="qwen",tp_rank="0"}} 0.25
"""
LLAMA_CPP = """\
llamacpp:kv_cache_usage_ratio {usage}
llamacpp:requests_processing {running}
llamacpp:requests_deferred {waiting}
"""
TGI = """\
tgi_batch_current_max_tokens {running}
tgi_batch_max_total_tokens 100
tgi_batch_current_size {running}
tgi_queue_size {waiting}
"""
TRT = """\
trtllm_kv_cache_utilization{{model_name="mix",engine="0"}} {usage}
trtllm_num_requests_running{{model_name="mix",engine="0"}} {running}
trtllm_num_requests_waiting{{model_name="mix",engine="0"}} {waiting}
"""
KINDS = {"vLLM": VLLM, "SGLang": SGLANG, "llama.cpp": LLAMA_CPP, "TGI": TGI, "TensorRT-LLM": TRT}


def page(kind: str, number: int) -> str:
    """Return the metrics page of engine ``number``, whose usage is its number in percent."""
    return KINDS[kind].format(
        usage=number % 100 / 100,
        running=number,
        waiting=number % 7,
        queries=100 + number,
        hits=number,
        preemptions=2 * number,
    )


class ManyEngines:
    """Answers ``/NAME`` with that engine's page, until ``close``.

    Attributes:
        pages: Name → page; a name that is taken out answers 404, as an engine that is down would.
    """

    def __init__(self, count: int) -> None:
        kinds = list(KINDS)
        self.pages = {f"engine-{n:03}": page(kinds[n % len(kinds)], n) for n in range(count)}
        pages = self.pages

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                text = pages.get(self.path.lstrip("/"))
                body = (text or "").encode()
                self.send_response(404 if text is None else 200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.address = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def scrape_config(engines: ManyEngines, real: Iterable[str] = (), interval: str = "1s") -> str:
    """Return a Prometheus configuration with each fake engine as a target of its own, and real ones beside them."""
    job = {
        "job_name": "engines",
        "static_configs": [{"targets": sorted(engines.pages)}],
        "relabel_configs": [
            {"source_labels": ["__address__"], "target_label": "instance"},
            {
                "source_labels": ["__address__"],
                "regex": "(.*)",
                "target_label": "__metrics_path__",
                "replacement": "/$1",
            },
            {"target_label": "__address__", "replacement": engines.address},
        ],
    }
    jobs = [job, {"job_name": "real", "static_configs": [{"targets": list(real)}]}]
    return json.dumps({"global": {"scrape_interval": interval, "scrape_timeout": interval}, "scrape_configs": jobs})
