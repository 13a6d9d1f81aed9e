"""How much of a request's time to first token its handoff adds, in a real cluster on this machine.

One prefill and one decode worker, each with a core of its own if there are two, run the model in
float32; requests come one at a time, each with a prompt that no cache knows. Everything is read
from the phases that the last message of an answer carries: the exposed transfer is what was not
hidden behind compute, from the end of the last chunk to the seal. The handoff of a decode worker
that has nothing else to do: what streams do to it is not measured here.
"""

import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.load import random_prompt
from core.config import (
    ClusterConfig,
    DecodeConfig,
    EngineConfig,
    PrefillConfig,
    TransferConfig,
)
from core.errors import PeerLost
from core.layout import Dtype
from core.settings.router import RouterConfig
from core.timeline import Phases
from deploy.local_cluster import local_cluster
from deploy.model_store import fetch_model
from twophase.client import Client, Sampling

PROMPTS_TOKENS = (128, 512, 2048)
NUM_ROUNDS = 5
MAX_TOKENS = 2
READY_TIMEOUT_S, READY_POLL_S = 60.0, 0.2
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Exposure:
    """Medians of one prompt length over one backend."""

    backend: str
    num_tokens: int
    prefill_s: float
    exposed_s: float
    ttft_s: float

    @property
    def share(self) -> float:
        """Exposed transfer as a part of the time to first token."""
        return self.exposed_s / self.ttft_s


def measure(backend: str, model: str) -> list[Exposure]:
    """Exposure of each length of PROMPTS_TOKENS over `backend`, on a cluster of its own.

    Raises:
        PeerLost: the cluster is not ready in time, or a KV cache was not shipped.
    """
    generator = random.Random(0)
    with (
        local_cluster(_config(backend, model), tell=lambda line: None) as cluster,
        Client(cluster.address) as client,
    ):
        _wait_until_ready(client)
        vocab_size = client.model().vocab_size
        prompts = {num: random_prompt(generator, num, vocab_size) for num in PROMPTS_TOKENS}
        for prompt in prompts.values():
            _phases(client, prompt)
        seen: dict[int, list[Phases]] = {num: [] for num in PROMPTS_TOKENS}
        for _ in range(NUM_ROUNDS):
            for num_tokens in PROMPTS_TOKENS:
                prompt = random_prompt(generator, num_tokens, vocab_size)
                seen[num_tokens].append(_phases(client, prompt))
    return [_median(backend, num_tokens, phases) for num_tokens, phases in seen.items()]


def _config(backend: str, model: str) -> ClusterConfig:
    cores = sorted(os.sched_getaffinity(0))
    return ClusterConfig(
        model=str(fetch_model(model)),
        engine=EngineConfig(dtype=Dtype.FLOAT32),
        prefill=PrefillConfig(cores=(cores[0],)),
        decode=DecodeConfig(cores=(cores[-1],)),
        transfer=TransferConfig.model_validate({"backend": backend}),
        router=RouterConfig(port=0, http_port=None),
    )


def _wait_until_ready(client: Client) -> None:
    until_s = time.monotonic() + READY_TIMEOUT_S
    while not client.status().is_ready:
        if time.monotonic() > until_s:
            raise PeerLost("cluster", f"not ready within {READY_TIMEOUT_S} s")
        time.sleep(READY_POLL_S)


def _phases(client: Client, prompt: Sequence[int]) -> Phases:
    sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
    *_, last = client.generate(prompt, sampling, timeout_s=REQUEST_TIMEOUT_S)
    assert last.completion is not None
    if last.completion.transfer is None:
        raise PeerLost("prefill", f"no KV cache was shipped: {last.completion.placement}")
    return last.completion.phases


def _median(backend: str, num_tokens: int, phases: Sequence[Phases]) -> Exposure:
    return Exposure(
        backend,
        num_tokens,
        statistics.median(p.prefill_s for p in phases),
        statistics.median(p.exposed_transfer_s for p in phases),
        statistics.median(p.time_to_first_token_s for p in phases),
    )
