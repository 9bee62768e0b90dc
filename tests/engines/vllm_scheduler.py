"""vLLM's own scheduler and block pool, of whatever release is on the path, driven without a model. Runs in its process.

Only the model is missing: each step's output is made up of random tokens. Hashing, sharing, eviction, preemption and
the free queue's order are vLLM's.
"""

from __future__ import annotations

import inspect
import os
import random
import time
from collections.abc import Callable
from typing import Any

os.environ.update(
    {
        "PYTHONHASHSEED": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
)


def fit(call: Callable[..., Any], **arguments: Any) -> Any:
    """Call something with those of the arguments that this release knows."""
    known = inspect.signature(call).parameters
    return call(**{name: value for name, value in arguments.items() if name in known})


class Driver:
    """A scheduler of vLLM's, and requests for it.

    Args:
        model: Directory of a model's configuration.
        num_blocks, block_size: Its pool.
        num_running: Requests that run at once.
        seed: For the requests.
    """

    def __init__(self, model: str, num_blocks: int, block_size: int = 16, num_running: int = 16, seed: int = 3) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        try:
            from vllm.utils.hashing import sha256
        except ImportError:
            from vllm.utils import sha256

        self._rng = random.Random(seed)
        self._made = 0
        config = EngineArgs(
            model=model,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=num_running,
            max_num_batched_tokens=8192,
            block_size=block_size,
            num_gpu_blocks_override=num_blocks,
            async_scheduling=False,
            enable_prefix_caching=True,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.block_size = block_size
        shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
        groups = [KVCacheGroupSpec(["layer"], fit(FullAttentionSpec, use_mla=False, **shape))]
        cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = fit(
            kv_cache_utils.get_request_block_hasher,
            block_size=block_size,
            hash_block_size=block_size,
            caching_hash_fn=sha256,
        )
        self.scheduler = fit(
            Scheduler,
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=block_size,
            log_stats=True,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._families = [[self._rng.randrange(3, 500) for _ in range(200)] for _ in range(6)]

    def add(self) -> None:
        """Add a request, which shares its beginning with others."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._made += 1
        rng = self._rng
        prompt = rng.choice(self._families) + [rng.randrange(3, 500) for _ in range(rng.randrange(100))]
        self.scheduler.add_request(
            fit(
                Request,
                request_id=f"r{self._made}",
                prompt_token_ids=prompt,
                pooling_params=None,
                eos_token_id=None,
                sampling_params=SamplingParams(max_tokens=rng.randrange(1, 240), ignore_eos=True),
                arrival_time=time.time(),
                block_hasher=self._hasher,
            )
        )

    def step(self) -> None:
        """Do what an engine core does in one step, with random tokens for the model's."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        tokens = [[self._rng.randrange(3, 500)] if self._is_decoding(name) else [] for name in names]
        output = fit(
            ModelRunnerOutput,
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(scheduled, output)

    def _is_decoding(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_tokens)
