"""A prefill worker under random orders of add, step, apply, failure and release.

The machine keeps its own simple record of who is where; after every event the worker's counts
must agree with it, and blocks of a running step must be nobody else's.
"""

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import InvalidRequest, Overloaded
from core.request import Request, RequestId, SamplingParams
from engine.batch import StepResult
from engine.block_pool import BlockPool
from prefill_worker.worker import PrefillWorker

BLOCK, NUM_BLOCKS, BUDGET, MAX_WAITING = 2, 6, 3, 3
names = st.sampled_from("abcde")


class PrefillMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.worker = PrefillWorker(
            self.pool, block_size=BLOCK, max_batch_tokens=BUDGET, max_waiting=MAX_WAITING
        )
        self.prompts = {}  # name -> prompt
        self.done = {}  # name -> tokens computed, as told
        self.running = None  # the steps handed out
        self.in_step = []  # (prompt, start) of each
        self.now_s = 0.0

    @rule(name=names, length=st.integers(1, 14), kind=st.integers(0, 1))
    def add(self, name, length, kind):
        prompt = tuple(kind * 100 + place for place in range(length))
        request = Request(RequestId(name), prompt, SamplingParams(), 1e9)
        with contextlib.suppress(InvalidRequest, Overloaded):
            self.worker.add(request, self.now_s)
            assert name not in self.prompts
            assert length <= NUM_BLOCKS * BLOCK
            self.prompts[name], self.done[name] = prompt, 0

    @precondition(lambda self: self.running is None)
    @rule()
    def start_step(self):
        steps = self.worker.next_steps()
        assert sum(len(s.token_ids) for s in steps) <= BUDGET
        for step in steps:
            assert len(step.block_table) * BLOCK >= step.end
            assert len(set(step.block_table)) == len(step.block_table)
        written = [
            step.block_table[slot]
            for step in steps
            for slot in range(step.start // BLOCK, (step.end - 1) // BLOCK + 1)
        ]
        assert len(set(written)) == len(written), "two prompts write one block"
        if steps:
            self.running = steps

    @precondition(lambda self: self.running is not None)
    @rule()
    def apply(self):
        self.now_s += 1.0
        tokens = [None if step.sampling is None else 7 for step in self.running]
        self.running = None
        for computed in self.worker.apply(StepResult(tokens, 0.5), self.now_s):
            name = computed.request_id
            assert computed.num_tokens > self.done[name]
            self.done[name] = computed.num_tokens
            is_last = computed.num_tokens == len(self.prompts[name])
            assert (computed.report is not None) == is_last
            assert (computed.first_token is not None) == is_last
            if is_last:
                assert computed.report.queue_s >= -1e-9
                assert computed.report.num_cached_tokens % BLOCK == 0

    @precondition(lambda self: self.running is not None)
    @rule()
    def fail_step(self):
        self.running = None
        for name in self.worker.step_failed():
            assert name in self.prompts
            self.release(name)

    @rule(name=names)
    def release(self, name):
        self.worker.release(name)
        self.prompts.pop(name, None)
        self.done.pop(name, None)

    @invariant()
    def counts_agree(self):
        counts = self.pool.counts()
        assert counts.free + counts.used == NUM_BLOCKS
        assert counts.quarantined == 0
        assert self.worker.num_waiting + self.worker.num_running == len(self.prompts)
        if not self.prompts and self.running is None:
            assert counts.used == 0

    @invariant()
    def blocks_of_a_step_are_held(self):
        for step in self.running or ():
            for block_id in step.block_table:
                assert block_id not in self.pool._free, "a block of the step was given back"

    def teardown(self):
        if self.running is not None:
            self.apply()
        for _ in range(200):
            for name in [n for n, p in self.prompts.items() if self.done[n] == len(p)]:
                self.release(name)
            self.start_step()
            if self.running is None:
                break
            self.apply()
        assert not self.prompts, "a prompt was never read"
        assert self.worker.num_waiting == self.worker.num_running == 0
        assert self.pool.counts().free == NUM_BLOCKS


PrefillMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = PrefillMachine.TestCase
