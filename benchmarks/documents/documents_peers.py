"""Another engine with a prefix cache, for `documents.py` to compare with: runs in its own venv.

    python documents_peers.py vllm --model FOLDER --dtype bfloat16 --pool-tokens 9600
    python documents_peers.py openvino --model FOLDER --dtype bfloat16 --pool-tokens 9600

It imports nothing of this repository, and is started by `documents.py`. vLLM reads a Hugging Face
folder, OpenVINO GenAI what `optimum-cli export openvino` has made of one. Both get two threads
unless told otherwise, and a KV pool of as many tokens as ragserve's.

Once the engine has given a first token this prints a line of JSON. Then each line that it reads,
`{"file": ..., "concurrency": ..., "warm": ...}`, is answered with one. The file holds prompts as
token ids; the cache is emptied first, and the first `warm` requests, which fill it, are not timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

FIRST = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
_BLOCK_SIZE = 32
"""The smallest that vLLM takes on a CPU, and the one that OpenVINO has there."""


class Seen:
    """What one request saw: seconds, and the prompt tokens that the engine says it had."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.id = request["id"]
        self.started = time.perf_counter()
        self.times: list[float] = []
        self.cached: int | None = None


class Peer(Protocol):
    """An engine."""

    version: str

    def run(self, requests: Sequence[dict[str, Any]], concurrency: int) -> list[Seen]:
        """Keep so many requests under way until all have ended."""

    def forget(self) -> None:
        """Empty the prefix cache."""

    def close(self) -> None:
        """End it."""


class VLLM:
    """vLLM's CPU build, in this process but for its engine core."""

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.version = f"vLLM {vllm.__version__}"
        self._loop = asyncio.new_event_loop()
        self._count = 0

        async def make() -> Any:
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=options.model,
                    dtype=options.dtype,
                    max_model_len=options.max_model_len,
                    max_num_seqs=64,
                    max_num_batched_tokens=2048,
                    block_size=_BLOCK_SIZE,
                    num_gpu_blocks_override=options.pool_tokens // _BLOCK_SIZE,
                    enable_prefix_caching=True,
                    disable_log_stats=True,
                )
            )

        self._engine = self._loop.run_until_complete(make())

    def run(self, requests: Sequence[dict[str, Any]], concurrency: int) -> list[Seen]:
        return self._loop.run_until_complete(self._run(requests, concurrency))

    def forget(self) -> None:
        self._loop.run_until_complete(self._engine.reset_prefix_cache())

    def close(self) -> None:
        self._engine.shutdown()
        del self._engine  # or it is shut down once more while the interpreter ends, and fails

    async def _run(self, requests: Sequence[dict[str, Any]], concurrency: int) -> list[Seen]:
        todo = iter(requests)
        seen = []

        async def client() -> None:
            for request in todo:
                seen.append(Seen(request))
                await self._one(request, seen[-1])

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return seen

    async def _one(self, request: dict[str, Any], seen: Seen) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._count += 1
        params = SamplingParams(
            temperature=0,
            max_tokens=request["n_out"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = TokensPrompt(prompt_token_ids=request["prompt"])
        outputs: AsyncIterator[Any] = self._engine.generate(prompt, params, str(self._count))
        async for output in outputs:
            new = output.outputs[0].token_ids
            if new and not seen.times:
                seen.cached = output.num_cached_tokens
            seen.times.extend([time.perf_counter()] * len(new))


class OpenVINO:
    """OpenVINO GenAI's pipeline with continuous batching."""

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
        import numpy as np
        import openvino
        import openvino_genai

        self.version = f"OpenVINO GenAI {openvino_genai.__version__.split('-')[0]}"
        self._np, self._ov, self._genai = np, openvino, openvino_genai
        self._options = options
        self._count = 0
        self._pipe: Any = None
        self.forget()

    def forget(self) -> None:
        # There is no other way to an empty cache than a new pipeline.
        self._pipe = None
        genai, options = self._genai, self._options
        scheduling = genai.SchedulerConfig()
        scheduling.max_num_batched_tokens = 2048
        scheduling.max_num_seqs = 64
        scheduling.dynamic_split_fuse = True
        scheduling.enable_prefix_caching = True
        scheduling.num_kv_blocks = options.pool_tokens // _BLOCK_SIZE
        precision = {"bfloat16": "bf16", "float32": "f32"}[options.dtype]
        self._pipe = genai.ContinuousBatchingPipeline(
            options.model,
            scheduling,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": options.threads,
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": precision,
                "ENABLE_CPU_PINNING": False,
            },
        )
        self.run([{"id": -1, "prompt": FIRST, "n_out": 2}], 1)

    def run(self, requests: Sequence[dict[str, Any]], concurrency: int) -> list[Seen]:
        todo = iter(requests)
        seen: list[Seen] = []
        live: list[tuple[Seen, Any, int]] = []

        def submit() -> None:
            request = next(todo, None)
            if request is not None:
                seen.append(Seen(request))
                live.append((seen[-1], self._submit(request), request["n_out"]))

        for _ in range(concurrency):
            submit()
        while live:
            self._pipe.step()
            for entry in list(live):
                one, handle, most = entry
                while handle.can_read():
                    new = sum(len(output.generated_ids) for output in handle.read().values())
                    one.times.extend([time.perf_counter()] * new)
                running = handle.get_status() == self._genai.GenerationStatus.RUNNING
                if len(one.times) >= most or not running:
                    live.remove(entry)
                    submit()
        return seen

    def close(self) -> None:
        self._pipe = None

    def _submit(self, request: dict[str, Any]) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = request["n_out"]
        config.ignore_eos = True
        config.do_sample = False
        self._count += 1
        ids = self._ov.Tensor(self._np.array([request["prompt"]], dtype=self._np.int64))
        return self._pipe.add_request(self._count, ids, config)


PEERS: dict[str, type[VLLM] | type[OpenVINO]] = {"vllm": VLLM, "openvino": OpenVINO}


def serve(peer: Peer) -> None:
    """Run what standard input asks for."""
    peer.run([{"id": -1, "prompt": FIRST, "n_out": 1}], 1)
    print(json.dumps({"ready": peer.version}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        with open(order["file"]) as file:
            requests = json.load(file)
        peer.forget()
        warm = order["warm"]
        if warm:
            peer.run(requests[:warm], order["concurrency"])
        seen = peer.run(requests[warm:], order["concurrency"])
        answer = [
            {"id": one.id, "started": one.started, "times": one.times, "cached": one.cached}
            for one in seen
        ]
        print(json.dumps({"seen": answer}), flush=True)
    peer.close()


def main() -> None:
    """Parse, load, serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--model", required=True, help="folder in the form that the peer reads")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--pool-tokens", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    serve(PEERS[options.peer](options))


if __name__ == "__main__":
    main()
