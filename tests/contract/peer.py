"""A second process for contract tests: it holds one end of a link and does as it is told."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import torch

from tests.contract.faulty import FaultPlan, faulty_connect
from tests.contract.handoff_ends import PrefillEnd
from tests.contract.kinds import Named, connect_named

NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 3, 4, 2, 8
NO_FAULTS = FaultPlan()
PEER_START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 20.0


def random_cache(dtype: torch.dtype, *, seed: int, num_blocks: int) -> torch.Tensor:
    """The same bytes in every process that passes the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_LAYERS, 2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(dtype)


class Commands:
    """What a peer can be told; each method answers with something that can be pickled."""

    def __init__(self, stream):
        self._stream = stream
        self._connect = connect_named
        self._sender = None
        self._handoff = None
        self._backend = None
        self._receiver = None

    def connect(self, offer, dtype, seed, num_blocks, timeout_s=10.0, plan=NO_FAULTS):
        cache = random_cache(dtype, seed=seed, num_blocks=num_blocks)
        self._sender = faulty_connect(self._connect, plan)(offer, cache, timeout_s)

    def push(self, reservation, source_ids, plan=NO_FAULTS):
        self._handoff = PrefillEnd(self._sender, self._stream, reservation, source_ids, plan)
        self._handoff.start()

    def num_sends(self):
        return self._handoff.num_sends

    def result(self):
        return self._handoff.result()

    def send(self, piece_id, span, source_block_ids, target_block_ids):
        return self._sender.send(piece_id, span, source_block_ids, target_block_ids)

    def has_room(self):
        return self._sender.has_room()

    def acknowledge(self, piece_id):
        self._sender.acknowledge(piece_id)

    def close(self):
        if self._handoff is not None:
            self._handoff.stop()
            self._handoff = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def offer(self, kind):
        self._backend = Named(kind, 10.0)
        cache = random_cache(torch.float32, seed=0, num_blocks=8)
        storage = self._backend.allocate(cache.nbytes)
        target = storage.view(cache.dtype).view(cache.shape)
        offer, self._receiver = self._backend.offer("link", target)
        return offer

    def accept(self):
        self._receiver.accept(10.0)

    def num_open(self):
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def serve(pipe: Connection, stream: Connection) -> None:
    """Execute commands until the pipe ends; an exception is the answer, as text."""
    torch.set_num_threads(1)
    commands = Commands(stream)
    pipe.send("ready")
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (getattr(commands, name)(*arguments), None)
        except Exception as error:  # whatever it is, the test wants to see it
            answer = (None, f"{type(error).__name__}: {error}")
        pipe.send(answer)


class PeerRaised(Exception):
    """The command failed in the peer."""


class Peer:
    """Handle of a peer process; its commands are called as methods."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.stream, their_stream = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, their_stream), daemon=True)
        self._process.start()
        theirs.close()
        their_stream.close()
        assert self._pipe.poll(PEER_START_TIMEOUT_S)
        assert self._pipe.recv() == "ready"

    def begin(self, name, *arguments):
        """Start a command without waiting for its answer."""
        self._pipe.send((name, arguments))

    def answer(self):
        assert self._pipe.poll(ANSWER_TIMEOUT_S), "the peer hangs"
        value, problem = self._pipe.recv()
        if problem:
            raise PeerRaised(problem)
        return value

    def __getattr__(self, name):
        def call(*arguments):
            self.begin(name, *arguments)
            return self.answer()

        return call

    def kill(self):
        self._process.kill()
        self._process.join()

    def freeze(self):
        os.kill(self._process.pid, signal.SIGSTOP)

    def stop(self):
        self._pipe.close()
        self.stream.close()
        self._process.kill()
        self._process.join()
        self._process.close()
