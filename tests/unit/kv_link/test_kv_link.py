"""The prefill end of a link whose decode worker is lost."""

import asyncio
import threading

from core.clock import ManualClock
from core.layout import Dtype, KVLayout
from core.link import LinkOpened
from core.request import WorkerName
from core.tally import Tally
from kv_link.counts import LinkCounts
from kv_link.link import Link, Way
from kv_transfer.reshape import CacheShape, Reshape

LAYOUT = KVLayout("w", Dtype.FLOAT32, block_size=4, num_layers=2, num_kv_heads=1, head_dim=8)
LIMIT_S = 2.0


class SlowToClose:
    """A sender that has much to unmap: until the event loop has done something else."""

    def __init__(self):
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.ended_in_time = []

    def close(self):
        self.has_begun.set()
        self.ended_in_time.append(self.may_end.wait(LIMIT_S))


class Stream:
    def __init__(self):
        self.is_closed = False

    def send(self, message):
        raise AssertionError(f"{message} is said to nobody")

    def close(self):
        self.is_closed = True


async def nothing_more():
    return
    yield


async def test_the_loop_goes_on_while_the_cache_of_a_lost_decode_worker_is_unmapped():
    sender, stream = SlowToClose(), Stream()
    shape = CacheShape(LAYOUT, 8)
    link = Link(
        LinkOpened("shm", "a test", (), LAYOUT, 8),
        Way(sender, Reshape(shape, shape), LinkCounts(Tally(), "decode-0", "memory")),
        stream,
        nothing_more(),
        peer_name=WorkerName("decode-0"),
        clock=ManualClock(),
    )
    running = asyncio.create_task(link.run())
    while not sender.has_begun.is_set():
        await asyncio.sleep(0)
    sender.may_end.set()
    await running
    assert all(sender.ended_in_time)
    assert stream.is_closed
