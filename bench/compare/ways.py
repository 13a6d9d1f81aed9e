"""The cluster of each way of serving: the same workers, threads, cores and memory."""

import os
from pathlib import Path

from bench.compare.plan import ComparePlan
from core.config import ClusterConfig, DecodeConfig, Mode, PrefillConfig
from core.settings.router import RouterConfig

WORDS = {
    Mode.COLOCATED: "each worker reads whole prompts, then makes tokens",
    Mode.CHUNKED: "each worker mixes pieces of prompts into its decode steps",
    Mode.DISAGGREGATED: "some workers read prompts, the others make tokens",
}


def cores_of(plan: ComparePlan) -> tuple[int, ...] | None:
    """The cores of all compute threads; None where there are too few to give each its own."""
    available = sorted(os.sched_getaffinity(0))
    num_needed = plan.workers * plan.threads
    if plan.cores is not None or len(available) < num_needed:
        return plan.cores
    return tuple(available[:num_needed])


def config_of(
    plan: ComparePlan, way: Mode, *, model: str, step_log: Path | None = None
) -> ClusterConfig:
    """The configuration of one way; model is a directory, step_log as in EngineConfig."""
    cores = cores_of(plan)
    num_prefill = plan.num_prefill_workers if way is Mode.DISAGGREGATED else 0
    cut = num_prefill * plan.threads
    decode = DecodeConfig(
        replicas=plan.workers - num_prefill,
        num_threads=plan.threads,
        cores=cores and cores[cut:],
        kv_cache=plan.kv_cache,
    )
    if way is Mode.CHUNKED:
        decode = decode.model_copy(update={"max_batch_tokens": plan.chunk_tokens})
    prefill = None
    if num_prefill:
        prefill = PrefillConfig(
            replicas=num_prefill,
            num_threads=plan.threads,
            cores=cores and cores[:cut],
            kv_cache=plan.kv_cache,
        )
    return ClusterConfig(
        model=model,
        mode=way,
        engine=plan.engine.model_copy(update={"step_log": step_log}),
        prefill=prefill,
        decode=decode,
        router=RouterConfig(port=0, http_port=None),
    )
