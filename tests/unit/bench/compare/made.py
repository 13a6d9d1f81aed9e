"""A comparison as if it had been played: answers whose times and tokens a test chooses."""

import itertools

from bench.compare.client import Answer
from bench.compare.crossover import Beside, Crossover
from bench.compare.metrics import Alone
from bench.compare.plan import ComparePlan
from bench.compare.run import Comparison, Played
from bench.compare.workload import Ask
from bench.load import Arrival
from bench.machine import CpuUse
from core.completion import Completion
from core.config import Mode
from core.errors import TwophaseError
from core.events.step_log import StepRecord
from core.request import FinishReason, RequestId, Usage, WorkerName
from core.timeline import Phases, TransferReport

QUIET = CpuUse(1.5, 0.0, 0.0)


def completion(way: Mode, *, total_s: float) -> Completion:
    phases = Phases(
        queue_s=0.1 * total_s,
        prefill_s=0.3 * total_s,
        decode_s=0.6 * total_s,
        total_s=total_s,
        time_to_first_token_s=0.4 * total_s,
    )
    moved = TransferReport("shm", 1_000_000, 4, push_s=0.1, exposed_s=0.02 * total_s)
    return Completion(
        RequestId("r"),
        FinishReason.LENGTH,
        Usage(100, 4),
        phases,
        moved if way is Mode.DISAGGREGATED else None,
        WorkerName("prefill-0"),
        WorkerName("decode-0"),
        "",
        0,
    )


def answered(
    way: Mode,
    due_s: float,
    *,
    ttft_s: float = 0.5,
    gap_s: float = 0.05,
    tokens: tuple[int, ...] = (1, 2, 3, 4),
    prompt: int = 100,
) -> Answer:
    answer = Answer(Ask(due_s, (7,) * prompt, len(tokens)), 100.0 + due_s)
    answer.log.sent_s = answer.due_s + 0.001
    first_s = answer.due_s + ttft_s
    answer.log.arrivals = [Arrival(first_s + gap_s * i, 1) for i in range(len(tokens))]
    answer.log.completion = completion(way, total_s=ttft_s + gap_s * (len(tokens) - 1))
    answer.token_ids = list(tokens)
    answer.margins = [1.0] * len(tokens)
    return answer


def failed(due_s: float, error: TwophaseError) -> Answer:
    answer = Answer(Ask(due_s, (7,) * 100, 4), 100.0 + due_s, error=error)
    answer.log.sent_s = answer.due_s
    return answer


def played(way: Mode, *answers: Answer, cpu: CpuUse = QUIET) -> Played:
    return Played("chat", way, 0, answers, cpu)


def comparison_of(
    *rounds: Played, crossover: Crossover | None = None, name: str = "chat"
) -> Comparison:
    ways = tuple(one.way for one in rounds)
    plan = ComparePlan.model_validate(
        {
            "workloads": [{"name": name, "input_tokens": 100, "output_tokens": 4}],
            "ways": ways,
            "rounds": 1,
        }
    )
    steps = {
        way: {
            WorkerName(worker): [
                StepRecord(100.0 + at / 10, 0.09, num_decoding, num_prompt)
                for at, num_decoding, num_prompt in zip(
                    range(100), itertools.cycle((1, 2)), itertools.cycle((0, 0, 64)), strict=False
                )
            ]
            for worker in ("decode-0", "prefill-0")
        }
        for way in ways
    }
    return Comparison(
        plan,
        max_context_tokens=4096,
        alone=Alone(((100, 0.5), (200, 1.0)), tpot_s=0.05),
        crossover=crossover,
        rounds=list(rounds),
        steps=steps,
    )


def beside(length: int, *, gap_s: float, ttft_s: float, quiet_s: float = 0.04) -> Beside:
    return Beside(length, ttft_s, quiet_s, gap_s, gap_s)


def two_ways() -> Comparison:
    """Disaggregation is steadier and has the first token later."""
    dues_s = (0.0, 1.0, 2.0, 3.0)
    stutter = [answered(Mode.COLOCATED, due_s, gap_s=0.4) for due_s in dues_s]
    steady = [answered(Mode.DISAGGREGATED, due_s, ttft_s=0.8, gap_s=0.06) for due_s in dues_s]
    crossover = Crossover(
        {
            Mode.COLOCATED: (
                beside(128, gap_s=0.15, ttft_s=0.2),
                beside(512, gap_s=0.9, ttft_s=0.8),
            ),
            Mode.DISAGGREGATED: (
                beside(128, gap_s=0.08, ttft_s=0.3, quiet_s=0.07),
                beside(512, gap_s=0.08, ttft_s=1.0, quiet_s=0.07),
            ),
        }
    )
    return comparison_of(
        played(Mode.COLOCATED, *stutter),
        played(Mode.DISAGGREGATED, *steady),
        crossover=crossover,
    )
