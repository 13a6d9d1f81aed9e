"""How calls to workers fail: as the loss of a worker, whatever gRPC calls it."""

import grpc
import pytest

from core.clock import ManualClock
from core.errors import PeerLost
from twophase.peer import Peer
from twophase.v1 import worker_pb2_grpc


class EndingWorker(worker_pb2_grpc.WorkerServicer):
    """A server in its last moments, which ends its calls by this status."""

    def __init__(self, code):
        self.code = code

    async def GetWorkerStatus(self, request, context):
        await context.abort(self.code, "the server ends")


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED],
)
async def test_a_call_that_the_worker_ended_is_a_lost_worker_and_nobody_cancelled(code):
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(EndingWorker(code), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peer = Peer(f"127.0.0.1:{port}", ManualClock())
    try:
        with pytest.raises(PeerLost):
            await peer.status(5.0)
    finally:
        await peer.close()
        await server.stop(None)
