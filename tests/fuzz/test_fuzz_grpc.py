"""Nothing that a client can put into a gRPC message hurts the router, its workers or neighbours."""

import collections
import sys

import grpc
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.messages import requests
from tests.fuzz.neighbours import undisturbed_neighbours
from twophase.v1 import admin_pb2, inference_pb2

TIMEOUT_S = 2.0
# AddWorker would look for workers wherever a drawn address says.
METHODS = [
    method
    for file in (inference_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name not in ("AddWorker",)
]
# A worker must not be lost by it, either.
FAULTS = {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "UNIMPLEMENTED", "DATA_LOSS", "ABORTED"}


@st.composite
def calls(draw):
    # Half of them go where most can be said.
    weighted = [m for m in METHODS if m.name.startswith("Generate")] * 4 + METHODS
    method = draw(st.sampled_from(weighted))
    return method, draw(requests(method.input_type._concrete_class))


def call(channel, method, data):
    """The status that ends the call: its name and details."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.server_streaming:
            collections.deque(channel.unary_stream(path)(data, timeout=TIMEOUT_S), maxlen=0)
        else:
            channel.unary_unary(path)(data, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        assert "Error'" not in error.details() and "Traceback" not in error.details()
        return error.code().name, error.details()
    return "OK", ""


def test_no_message_ends_in_a_fault_and_none_disturbs_running_streams(cluster, num_requests):
    ends = collections.Counter()

    @settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls())
    def fuzz(asked):
        method, data = asked
        end, details = call(channel, method, data)
        ends[end] += 1
        assert end not in FAULTS, f"{method.name}({data!r}): {details}"

    with (
        undisturbed_neighbours(cluster.address),
        grpc.insecure_channel(cluster.address) as channel,
    ):
        fuzz()
    sys.stdout.write(f"{ends.total()} gRPC requests: {dict(ends.most_common())}\n")
    assert ends.keys() >= {"OK", "INVALID_ARGUMENT"}
