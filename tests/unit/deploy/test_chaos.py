"""Faults spare the last of a pool, streams are judged rightly, and all is off unless enabled."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from core.config import ClusterConfig, load_config
from core.errors import ConfigError, PeerLost
from core.link import Span
from core.settings.chaos import ChaosConfig, FaultKind
from deploy.chaos.faults import Fault, next_fault, pool_of
from deploy.chaos.load import KINDS, NEAR_TIE, Stream, prompt_of, sampling_of
from deploy.chaos.run import MAX_GROWTH_BYTES, Outcome
from deploy.commands import chaos as command
from deploy.commands.chaos import EXIT_BROKEN, chaos_run
from kv_link.bad_link import NOTHING_CHECKSUM, BadSender

WORKERS = st.sets(
    st.sampled_from([f"{pool}-{i}" for pool in ("prefill", "decode", "router") for i in "012"])
)


@given(WORKERS, st.integers())
def test_a_fault_never_hits_the_last_worker_of_a_pool_nor_the_last_router(up, seed):
    fault = next_fault(list(FaultKind), sorted(up), random.Random(seed))
    if fault is None:
        assert len({pool_of(worker) for worker in up}) == len(up)
    else:
        left = up - {fault.target}
        assert fault.target in up
        assert pool_of(fault.target) in {pool_of(worker) for worker in left}


class TestStreams:
    def test_any_other_token_is_a_difference_and_so_is_one_too_many_or_few(self):
        expected = Stream(0, [1, 2, 3])
        differences = [
            Stream(0, token_ids).first_difference(expected)
            for token_ids in ([1, 2, 3], [1, 9, 3], [1, 2], [1, 2, 3, 4])
        ]
        assert differences == [None, 1, 2, 3]

    def test_behind_a_near_tie_anything_may_follow(self):
        expected = Stream(0, [1, 2, 3], margins=[1.0, NEAR_TIE / 2, 1.0])
        assert Stream(0, [1, 9, 9, 9]).first_difference(expected) is None
        assert Stream(0, [9, 2, 3]).first_difference(expected) == 0

    def test_each_asks_the_same_every_time_and_no_two_the_same(self):
        prompts = [tuple(prompt_of(number, 512)) for number in range(16)]
        assert prompts == [tuple(prompt_of(number, 512)) for number in range(16)]
        assert len(set(prompts)) == 16
        samplings = [sampling_of(number, 96, 512) for number in range(len(KINDS))]
        assert len({repr(sampling) for sampling in samplings}) == len(KINDS)


class TestConfig:
    def test_faults_are_off_unless_enabled(self):
        assert not ClusterConfig().chaos.enabled
        with pytest.raises(ConfigError, match=r"chaos\.enabled"):
            chaos_run(ClusterConfig(), Console(quiet=True))

    def test_a_fault_that_would_not_happen_is_refused(self):
        with pytest.raises(ConfigError, match="lost_pieces has no effect"):
            load_config(None, ["chaos.lost_pieces=0.5"])
        assert load_config(None, ["chaos.enabled=true", "chaos.lost_pieces=0.5"]).chaos.is_link_bad


class TestVerdict:
    @pytest.mark.parametrize(
        ("broken", "said"),
        [
            ({}, "nothing was broken"),
            ({"streams": [Stream(0, error=PeerLost("decode-0", "gone"))]}, "failed: decode-0"),
            ({"streams": [Stream(0, [1, 9])]}, "differs from token 1 on"),
            ({"left": {"decode-0 blocks": 3}}, "decode-0 blocks"),
            ({"leaked": (17,)}, "did not end: (17,)"),
            ({"growth_bytes": MAX_GROWTH_BYTES + 1}, "grew by 67.1 MB"),
        ],
    )
    def test_whatever_was_broken_is_told(self, monkeypatch, capsys, broken, said):
        right = {"streams": [Stream(0, [1, 2])], "faults": [Fault(FaultKind.KILL, "decode-0")]}
        outcome = Outcome(expected={0: Stream(0, [1, 2])}, **(right | broken))
        monkeypatch.setattr(command, "run_chaos", lambda config, tell: outcome)
        config = ClusterConfig(chaos=ChaosConfig(enabled=True))
        assert chaos_run(config, Console(width=200)) == (EXIT_BROKEN if broken else 0)
        assert said in capsys.readouterr().out


class RealSender:
    """Notes what is sent."""

    max_piece_bytes = 64

    def __init__(self):
        self.sent, self.acknowledged, self.is_closed = [], [], False

    def has_room(self):
        return True

    def send(self, piece_id, span, source_block_ids, target_block_ids):
        self.sent.append(piece_id)
        return 7

    def acknowledge(self, piece_id):
        self.acknowledged.append(piece_id)

    def close(self):
        self.is_closed = True


def test_a_bad_link_loses_its_share_of_the_pieces_and_passes_on_the_rest():
    real = RealSender()
    bad = BadSender(
        real, ChaosConfig(enabled=True, lost_pieces=0.25, piece_delay_s=1e-4), page_bytes=1
    )
    checksums = [bad.send(number, None, (), ()) for number in range(400)]
    bad.acknowledge(3)
    bad.close()
    assert set(checksums) == {NOTHING_CHECKSUM, 7}
    assert checksums.count(7) == len(real.sent)
    assert 60 <= checksums.count(NOTHING_CHECKSUM) <= 140
    assert (bad.max_piece_bytes, bad.has_room()) == (64, True)
    assert (real.acknowledged, real.is_closed) == ([3], True)


def test_a_slow_link_takes_the_time_that_its_bytes_need_and_small_pieces(monkeypatch):
    slept = []
    monkeypatch.setattr("kv_link.bad_link.time.sleep", slept.append)
    real = RealSender()
    real.max_piece_bytes = 8 << 20
    bad = BadSender(real, ChaosConfig(enabled=True, link_bytes_per_s=1e6), page_bytes=1000)
    assert bad.send(1, Span(0, num_layers=5, first_block=0, num_blocks=3), range(3), range(3)) == 7
    assert slept == [2 * 5 * 3 * 1000 / 1e6]
    assert bad.max_piece_bytes == 250_000
