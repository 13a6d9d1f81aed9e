"""Prompts, blocks and steps of a prefill worker: lives, refusals, and nothing is left."""

import dataclasses

import pytest

from core.config import load_config
from core.errors import ConfigError, InvalidRequest, Overloaded
from core.request import OutputToken, Request, RequestId, SamplingParams
from engine.batch import StepResult
from engine.block_pool import BlockPool
from kv_link.link import LinkLoad
from prefill_worker.config import PrefillWorkerConfig
from prefill_worker.worker import PrefillWorker

BLOCK = 4
GREEDY = SamplingParams()


def make_worker(*, num_blocks=16, budget=8, max_waiting=8):
    pool = BlockPool(num_blocks, BLOCK)
    return PrefillWorker(pool, block_size=BLOCK, max_batch_tokens=budget, max_waiting=max_waiting)


def make_request(request_id, num_tokens, *, first=0):
    return Request(RequestId(request_id), tuple(range(first, first + num_tokens)), GREEDY, 1e9)


def step(worker, now_s=1.0, compute_s=0.25):
    """One step; token 7 for each prompt that asks for one."""
    steps = worker.next_steps()
    return worker.apply(
        StepResult([None if s.sampling is None else 7 for s in steps], compute_s), now_s
    )


def run(worker):
    """Steps until there is nothing to compute: all that was told."""
    told = []
    while computed := step(worker):
        told += computed
    return told


def assert_nothing_is_left(worker):
    counts = worker.pool.counts()
    assert (worker.num_waiting, worker.num_running, worker.num_waiting_tokens) == (0, 0, 0)
    assert (counts.used, counts.quarantined, counts.free) == (0, 0, counts.total)
    assert worker.next_steps() == []


class TestAWholeLife:
    def test_chunk_by_chunk_with_the_first_token_at_the_end(self):
        worker = make_worker(budget=4)
        # 1 it waits
        worker.add(make_request("r", 10), now_s=0.0)
        assert (worker.num_waiting, worker.num_running, worker.num_waiting_tokens) == (1, 0, 10)
        # 2 it gets all its blocks with its first chunk
        (chunk,) = worker.next_steps()
        assert (chunk.token_ids, chunk.start, chunk.sampling) == ((0, 1, 2, 3), 0, None)
        assert worker.pool.counts().used == 3
        assert (worker.num_waiting, worker.num_running) == (0, 1)
        # 3 each chunk is told, so that it can be pushed
        (computed,) = worker.apply(StepResult([None], 0.5), now_s=1.0)
        assert (computed.num_tokens, computed.first_token, computed.report) == (4, None, None)
        assert computed.block_ids == tuple(chunk.block_table)
        assert [c.num_tokens for c in step(worker, 2.0, 0.5)] == [8]
        # 4 the last one samples and reports
        (chunk,) = worker.next_steps()
        assert (chunk.token_ids, chunk.start, chunk.sampling) == ((8, 9), 8, GREEDY)
        (computed,) = worker.apply(StepResult([7], 0.5), now_s=3.0)
        assert (computed.num_tokens, computed.first_token) == (10, OutputToken(7))
        queue, *chunks = computed.report.events
        assert dataclasses.astuple(computed.report)[:4] == (1.5, 1.5, 0, 3)
        assert (queue.begin_s, queue.end_s) == (0.0, 0.5)
        assert [(c.begin_s, c.end_s, c.num_tokens) for c in chunks] == [
            (0.5, 1.0, 4),
            (1.5, 2.0, 4),
            (2.5, 3.0, 2),
        ]
        assert (worker.num_steps, worker.num_waiting_tokens) == (3, 0)
        # 5 its blocks stay its own until released, once
        assert worker.next_steps() == []
        assert worker.pool.counts().used == 3
        worker.release("r")
        worker.release("r")
        assert_nothing_is_left(worker)
        assert worker.pool.counts().cached == 2

    def test_a_batch_tells_each_prompt_its_own(self):
        worker = make_worker(budget=12)
        worker.add(make_request("a", 4), 0.0)
        worker.add(make_request("b", 3, first=50), 0.0)
        steps = worker.next_steps()
        assert [len(s.token_ids) for s in steps] == [4, 3]
        told = worker.apply(StepResult([11, 22], 0.5), 1.0)
        assert [(c.request_id, c.first_token.token_id) for c in told] == [("a", 11), ("b", 22)]
        for name in "ab":
            worker.release(name)
        assert_nothing_is_left(worker)


class TestLayerByLayer:
    def test_the_layers_of_a_running_step_are_told_for_each_prompt_in_it(self):
        worker = make_worker(budget=12)
        worker.add(make_request("a", 6), 0.0)
        worker.add(make_request("b", 9, first=50), 0.0)
        steps = worker.next_steps()
        told = worker.layer_computed(2)
        assert [(t.request_id, t.num_tokens, t.num_layers) for t in told] == [
            ("a", 6, 2),
            ("b", 6, 2),
        ]
        assert [t.block_ids for t in told] == [tuple(s.block_table) for s in steps]
        # a cancelled prompt is nobody's business any more
        worker.release("a")
        assert [t.request_id for t in worker.layer_computed(3)] == ["b"]
        worker.apply(StepResult([7, None], 0.25), 1.0)
        assert worker.layer_computed(3) == []
        worker.next_steps()
        assert [t.num_tokens for t in worker.layer_computed(1)] == [9]
        worker.apply(StepResult([7], 0.25), 1.0)
        worker.release("b")
        assert_nothing_is_left(worker)


class TestTheAudit:
    def test_names_everybody_who_waits_or_holds_blocks_and_since_when(self):
        worker = make_worker(num_blocks=6, budget=8)
        worker.add(make_request("pushing", 4), 0.0)
        step(worker)
        worker.add(make_request("computing", 16, first=50), 1.0)
        step(worker)
        worker.add(make_request("waiting", 16, first=90), 2.0)
        holders = worker.holders("prefill-0", now_s=5.0)
        assert [(h.request_id, h.state, h.num_blocks, h.age_s) for h in holders] == [
            ("pushing", "pushing", 1, 5.0),
            ("computing", "computing", 4, 4.0),
            ("waiting", "waiting", 0, 3.0),
        ]
        assert [h.epoch for h in holders] == [1, 2, 0]
        for holder in holders:
            worker.release(holder.request_id)
        assert worker.holders("prefill-0", now_s=5.0) == []
        assert_nothing_is_left(worker)


class TestPrefixSharing:
    def test_the_same_prompt_again_computes_only_its_last_block(self):
        worker = make_worker(budget=64)
        worker.add(make_request("a", 12), 0.0)
        first = run(worker)[-1]
        worker.add(make_request("b", 12), 0.0)
        (chunk,) = worker.next_steps()
        # 8 of 12: the last token has to be computed for its logits
        assert (chunk.start, chunk.token_ids) == (8, (8, 9, 10, 11))
        (second,) = worker.apply(StepResult([7], 0.25), 1.0)
        assert second.report.num_cached_tokens == 8
        assert second.block_ids[:2] == first.block_ids[:2]
        assert second.block_ids[2] != first.block_ids[2]
        worker.release("a")
        assert worker.pool.counts().used == 3
        worker.release("b")
        assert_nothing_is_left(worker)

    def test_what_a_cancelled_prompt_computed_serves_the_next_one(self):
        worker = make_worker(budget=4)
        worker.add(make_request("a", 12), 0.0)
        step(worker)
        step(worker)
        worker.release("a")
        worker.add(make_request("b", 12), 0.0)
        (chunk,) = worker.next_steps()
        assert chunk.start == 8
        worker.apply(StepResult([7], 0.25), 1.0)
        worker.release("b")
        assert_nothing_is_left(worker)

    def test_blocks_of_a_failed_step_are_not_findable(self):
        worker = make_worker(budget=4)
        worker.add(make_request("a", 12), 0.0)
        step(worker)
        worker.next_steps()
        assert worker.step_failed() == ["a"]
        worker.release("a")
        assert worker.pool.counts().cached == 1
        assert_nothing_is_left(worker)


class TestCancel:
    def test_while_it_waits(self):
        worker = make_worker()
        worker.add(make_request("r", 10), 0.0)
        worker.release("r")
        assert_nothing_is_left(worker)

    @pytest.mark.parametrize("ending", ["apply", "step_failed"])
    def test_during_a_step_keeps_the_blocks_until_the_step_ended(self, ending):
        worker = make_worker()
        worker.add(make_request("r", 10), 0.0)
        worker.next_steps()
        worker.release("r")
        assert worker.pool.counts().used == 3
        if ending == "apply":
            assert worker.apply(StepResult([None], 0.25), 1.0) == []
        else:
            assert worker.step_failed() == []
        assert_nothing_is_left(worker)

    def test_the_id_can_be_used_again_while_the_old_one_is_still_in_a_step(self):
        worker = make_worker(budget=4)
        worker.add(make_request("r", 6), 0.0)
        worker.next_steps()
        worker.release("r")
        worker.add(make_request("r", 6, first=70), 0.0)
        assert worker.apply(StepResult([None], 0.25), 1.0) == []
        told = run(worker)
        assert [c.num_tokens for c in told] == [4, 6]
        assert told[-1].report.num_cached_tokens == 0
        worker.release("r")
        assert_nothing_is_left(worker)

    def test_of_somebody_unknown_changes_nothing(self):
        worker = make_worker()
        worker.release("nobody")
        assert_nothing_is_left(worker)


class TestBounds:
    def test_an_id_in_use_is_refused(self):
        worker = make_worker()
        worker.add(make_request("r", 4), 0.0)
        with pytest.raises(InvalidRequest) as caught:
            worker.add(make_request("r", 4), 0.0)
        assert (caught.value.field, caught.value.limit) == ("request_id", "is in use")
        assert worker.num_waiting == 1
        worker.release("r")
        assert_nothing_is_left(worker)

    def test_a_prompt_that_never_fits_is_refused_with_the_limit(self):
        worker = make_worker(num_blocks=2)
        worker.add(make_request("fits", 8), 0.0)
        with pytest.raises(InvalidRequest) as caught:
            worker.add(make_request("r", 9), 0.0)
        assert (caught.value.field, caught.value.value) == ("prompt", "9 tokens")
        assert "holds 8 tokens" in caught.value.limit
        worker.release("fits")
        assert_nothing_is_left(worker)

    def test_a_full_queue_is_overload_and_running_prompts_do_not_count(self):
        worker = make_worker(num_blocks=2, max_waiting=1)
        worker.add(make_request("a", 8), 0.0)
        step(worker)
        worker.add(make_request("b", 8, first=50), 0.0)
        with pytest.raises(Overloaded, match="1 prompts wait"):
            worker.add(make_request("c", 8), 0.0)
        worker.release("b")
        worker.add(make_request("c", 8), 0.0)
        worker.release("a")
        worker.release("c")
        assert_nothing_is_left(worker)

    def test_nobody_passes_a_prompt_that_waits_for_blocks(self):
        worker = make_worker(num_blocks=4, budget=64)
        worker.add(make_request("big", 12), 0.0)
        step(worker)
        worker.add(make_request("next", 8, first=50), 0.0)
        worker.add(make_request("small", 4, first=70), 0.0)
        assert worker.next_steps() == []
        assert worker.num_waiting == 2
        worker.release("big")
        assert [s.token_ids[0] for s in worker.next_steps()] == [50, 70]
        worker.apply(StepResult([7, 7], 0.25), 1.0)
        worker.release("next")
        worker.release("small")
        assert_nothing_is_left(worker)


class TestConfig:
    def test_a_replica_is_named_and_takes_its_cores(self):
        cluster = load_config(None, ["prefill.replicas=2", "prefill.cores=[4, 6]"])
        config = PrefillWorkerConfig.from_cluster(cluster, replica=1)
        assert (config.name, config.cores) == ("prefill-1", (6,))
        assert config.pool == cluster.prefill

    @pytest.mark.parametrize("mode", ["chunked", "colocated"])
    def test_a_mode_without_prefill_workers_is_refused(self, mode):
        with pytest.raises(ConfigError, match=f"{mode} has no prefill workers"):
            PrefillWorkerConfig.from_cluster(load_config(None, [f"mode={mode}"]))


class TestWhatItMeasures:
    def signals(self, worker, now_s, links=()):
        return worker.meter.signals(
            now_s,
            oldest_wait_s=worker.oldest_wait_s(now_s),
            num_parked=worker.num_parked,
            links=links,
        )

    def test_a_wait_ends_with_the_first_step_and_reading_is_per_second_of_computing(self):
        worker = make_worker(budget=4)
        worker.add(make_request("a", 8), now_s=0.0)
        worker.add(make_request("b", 4, first=50), now_s=1.0)
        assert worker.oldest_wait_s(3.0) == 3.0
        step(worker, now_s=4.0, compute_s=0.5)  # half of the budget each
        assert worker.oldest_wait_s(9.0) == 0.0
        step(worker, now_s=9.0, compute_s=0.5)
        told = self.signals(worker, 9.0)
        # "a" waited from 0 to 3.5, "b" from 1 to 3.5; 8 tokens took one second.
        assert (told.queue_wait_p50_s, told.queue_wait_p95_s) == (2.5, 3.5)
        assert told.tokens_per_s == 8.0
        later = self.signals(worker, 99.0)
        assert (later.queue_wait_p50_s, later.tokens_per_s) == (None, 8.0)  # as fast as before

    def test_a_prompt_that_is_read_is_parked_until_it_is_released(self):
        worker = make_worker()
        worker.add(make_request("a", 4), now_s=0.0)
        assert self.signals(worker, 0.0).num_parked == 0
        step(worker)
        assert self.signals(worker, 1.0).num_parked == 1
        worker.release("a")
        assert self.signals(worker, 1.0).num_parked == 0

    def test_links_add_up_and_one_that_carried_nothing_is_not_zero(self):
        worker = make_worker()
        worker.meter.sealed(0.2, 1.0)
        told = self.signals(worker, 1.0, [LinkLoad(5, 1e6, 4e6), LinkLoad(7, None, None)])
        assert told.num_in_flight_bytes == 12
        assert (told.bytes_per_s, told.max_bytes_per_s, told.transfer_wait_s) == (1e6, 4e6, 0.2)
        assert self.signals(worker, 1.0).bytes_per_s is None
