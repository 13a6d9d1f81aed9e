"""What is played: plans, requests made of them, and the client that keeps the schedule."""

import asyncio
import time
from pathlib import Path

import pytest

from bench.compare.client import play
from bench.compare.plan import ComparePlan, WorkloadPlan, load_plan
from bench.compare.ways import config_of
from bench.compare.workload import Ask, Workload, read_prompts
from core.completion import Chunk
from core.config import Mode
from core.errors import ConfigError, Overloaded
from core.layout import Dtype
from core.request import Logprobs

TRACES = Path(__file__).parents[3] / "data" / "traces"
AZURE, MOONCAKE = TRACES / "azure_code_head.csv", TRACES / "mooncake_conversation_head.jsonl"
VOCAB_SIZE, CONTEXT = 512, 4096


def asks_of(round_number: int = 0, *, seed: int = 1, **fields) -> list[Ask]:
    workload = Workload.load(WorkloadPlan(**fields), (), seed=seed)
    return workload.asks(round_number, VOCAB_SIZE, CONTEXT)


class TestRequests:
    def test_the_same_plan_gives_the_same_requests(self):
        fields = {"trace": AZURE, "requests_per_s": 2.0, "divide": 4}

        assert asks_of(**fields) == asks_of(**fields)
        assert asks_of(**fields) != asks_of(seed=2, **fields)

    def test_rounds_have_the_same_lengths_and_times_and_other_tokens(self):
        first, second = (asks_of(n, input_tokens=20, requests_per_s=2.0) for n in (0, 1))

        assert [(a.due_s, len(a.prompt)) for a in first] == [
            (a.due_s, len(a.prompt)) for a in second
        ]
        assert not {a.prompt for a in first} & {a.prompt for a in second}

    def test_a_trace_keeps_its_own_arrivals_and_lengths(self):
        asks = asks_of(trace=AZURE, max_requests=2, max_input_tokens=100_000)

        assert (asks[0].due_s, len(asks[0].prompt), asks[0].num_output_tokens) == (0.0, 4086, 10)
        assert asks[1].due_s == pytest.approx(0.052)
        assert (len(asks[1].prompt), asks[1].num_output_tokens) == (3180, 8)

    def test_a_trace_is_played_faster_and_its_lengths_divided_and_cut(self):
        asks = asks_of(trace=AZURE, rate=2.0, divide=4, divide_output=1, max_input_tokens=900)

        assert asks[1].due_s == pytest.approx(0.026)
        assert (len(asks[0].prompt), asks[0].num_output_tokens) == (900, 10)
        assert len(asks[1].prompt) == 3180 // 4

    def test_poisson_arrivals_have_the_rate_and_end_in_time(self):
        asks = asks_of(input_tokens=8, requests_per_s=50.0, duration_s=20.0)

        assert len(asks) == pytest.approx(1000, rel=0.15)
        assert asks[-1].due_s <= 20.0
        assert len(asks_of(input_tokens=8, requests_per_s=50.0, max_requests=7)) == 7

    def test_prompts_that_share_blocks_in_the_trace_begin_alike(self):
        asks = asks_of(trace=MOONCAKE, divide=32, max_requests=20)

        # Block 0, which every request of this trace begins with, has 512 / 32 tokens.
        assert len({ask.prompt[:16] for ask in asks}) == 1
        assert len({ask.prompt[:32] for ask in asks}) > 1

    def test_every_request_fits_the_context(self):
        asks = asks_of(input_tokens=4000, output_tokens=500)

        assert all(len(ask.prompt) + ask.num_output_tokens <= CONTEXT for ask in asks)

    def test_prompts_of_a_file_take_turns(self, tmp_path):
        path = tmp_path / "prompts.txt"
        path.write_text("one\n\ntwo\n")
        plan = WorkloadPlan(prompts=path, output_tokens=3)
        assert read_prompts(plan) == ["one", "two"]

        workload = Workload.load(plan, [(1,), (2, 2)], seed=1)

        asks = workload.asks(0, VOCAB_SIZE, CONTEXT)
        assert [ask.prompt for ask in asks[:3]] == [(1,), (2, 2), (1,)]
        assert asks[0].num_output_tokens == 3

    def test_a_file_without_a_prompt_is_refused(self, tmp_path):
        path = tmp_path / "prompts.txt"
        path.write_text("\n")

        with pytest.raises(ConfigError, match="holds no prompt"):
            read_prompts(WorkloadPlan(prompts=path))


class TestPlans:
    def test_words_of_the_command_line_go_to_the_workload_or_the_plan(self):
        plan = load_plan(None, ["requests_per_s=2", "rounds=3"], {"input_tokens": 8})

        assert (plan.workloads[0].requests_per_s, plan.rounds) == (2.0, 3)
        assert plan.engine.dtype is Dtype.BFLOAT16

    def test_paths_of_a_plan_are_seen_from_its_place(self, tmp_path):
        (tmp_path / "t.csv").write_text(AZURE.read_text())
        path = tmp_path / "plan.yaml"
        path.write_text("workloads: [{name: a, trace: t.csv}]\nworkers: 4\n")

        plan = load_plan(path, ["rounds=1"], {})

        assert plan.workloads[0].trace == tmp_path / "t.csv"
        assert plan.num_prefill_workers == 2

    def test_the_kept_plan_is_valid(self):
        kept = Path(__file__).parents[4] / "docs" / "comparison" / "plan.yaml"

        plan = load_plan(kept, [], {})

        assert [workload.name for workload in plan.workloads] == ["code", "conversation"]

    @pytest.mark.parametrize(
        ("overrides", "workload", "words"),
        [
            ([], {}, "give a plan, or one of"),
            ([], {"input_tokens": 1, "trace": str(AZURE)}, "has one of trace"),
            (["rate=2"], {"input_tokens": 1}, "are of a trace"),
            (["rate=2", "requests_per_s=1"], {"trace": str(AZURE)}, "rate has no effect"),
            (["prefill_workers=2"], {"input_tokens": 1}, "decode needs one"),
            (["cores=[0]"], {"input_tokens": 1}, "cores names 1; all threads take 2"),
            (["crossover.input_tokens=[5, 3]"], {"input_tokens": 1}, "each greater than"),
            (["ways=[chunked, chunked]"], {"input_tokens": 1}, "names a mode twice"),
            (["roundz=2"], {"input_tokens": 1}, "not a known key; did you mean 'rounds'"),
            ([], {"trace": "nowhere.csv"}, "there is no file nowhere.csv"),
        ],
    )
    def test_what_cannot_be_played_is_refused(self, overrides, workload, words):
        with pytest.raises(ConfigError) as refused:
            load_plan(None, overrides, workload)
        assert words in str(refused.value)

    def test_all_ways_have_the_same_workers_threads_and_memory(self):
        plan = ComparePlan.model_validate(
            {
                "workloads": [{"input_tokens": 8}],
                "workers": 3,
                "prefill_workers": 2,
                "cores": [5, 6, 7],
            }
        )

        configs = {way: config_of(plan, way, model="m") for way in plan.ways}

        for config in configs.values():
            pools = [pool for pool in (config.prefill, config.decode) if pool is not None]
            assert sum(pool.replicas for pool in pools) == 3
            assert sum((pool.cores for pool in pools), ()) == (5, 6, 7)
            assert {pool.kv_cache for pool in pools} == {plan.kv_cache}
        assert configs[Mode.DISAGGREGATED].prefill.replicas == 2
        assert configs[Mode.CHUNKED].decode.max_batch_tokens == plan.chunk_tokens


class SlowServer:
    """Answers with one token after `delay_s`, and a second one at once; refuses long prompts."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self.num_running = self.most_running = 0

    async def generate(self, prompt, sampling, *, timeout_s):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(self._delay_s)
        self.num_running -= 1
        if len(prompt) > 2:
            raise Overloaded("no room")
        likely = Logprobs(-0.1, ((5, -0.1), (6, -2.1)))
        yield Chunk("", (5,), logprobs=(likely,))
        yield Chunk("", (6,), logprobs=(likely,))


class TestTheClient:
    async def test_a_slow_answer_delays_no_later_request(self):
        server = SlowServer(0.3)
        asks = [Ask(0.02 * number, (1, 2), 2) for number in range(5)]

        answers = await play(server, asks, timeout_s=5.0)

        assert server.most_running == 5
        assert [answer.ask for answer in answers] == asks
        dues_s = [answer.due_s - answers[0].due_s for answer in answers]
        assert dues_s == pytest.approx([ask.due_s for ask in asks])
        assert all(answer.lateness_s >= 0 for answer in answers)

    async def test_times_count_from_when_a_request_was_due(self):
        async def busy_client():
            await asyncio.sleep(0.05)
            time.sleep(0.2)  # noqa: ASYNC251 - it stands for a client that has no time

        asks = [Ask(0.0, (1, 2), 2), Ask(0.02, (1, 2), 2)]
        answers, _ = await asyncio.gather(
            play(SlowServer(0.01), asks, timeout_s=5.0), busy_client()
        )

        late = answers[1]
        assert late.lateness_s > 0.05
        assert late.timing().ttft_s >= late.lateness_s

    async def test_tokens_margins_and_errors_are_kept(self):
        ended = []
        asks = [Ask(0.0, (1, 2), 2), Ask(0.0, (1, 2, 3), 2)]

        good, bad = await play(SlowServer(0.0), asks, timeout_s=5.0, on_end=lambda: ended.append(1))

        assert (good.token_ids, good.margins) == ([5, 6], [pytest.approx(2.0)] * 2)
        assert isinstance(bad.error, Overloaded) and bad.timing() is None
        assert len(ended) == 2
