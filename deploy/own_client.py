"""How whoever started a cluster calls its router: as an administrator, by the cluster's secret."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import TwophaseError
from core.settings.security import SecurityConfig
from twophase.client import Client
from twophase.credentials import Credentials

INFERENCE = "twophase.v1.Inference"


def own_client(address: str, security: SecurityConfig) -> Client:
    """A client that may call everything.

    Raises:
        ConfigError: the secret or a certificate cannot be read.
    """
    secret = security.read_cluster_secret()
    return Client(address, api_key=secret, tls=security.own_client_tls)


def wait_until_ready(address: str, security: SecurityConfig, timeout_s: float) -> None:
    """Wait until the router's health says that a token went through both pools.

    Raises:
        TwophaseError: it did not within `timeout_s`, or the router ended.
    """
    credentials = Credentials(tls=security.own_client_tls)
    channel = credentials.open_channel(grpc, address, ())
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        for response in stub.Watch(request, timeout=timeout_s):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return
    except grpc.RpcError as error:
        raise TwophaseError(f"the cluster is not ready: {error}") from error
    finally:
        channel.close()
    raise TwophaseError("the router ended before the cluster was ready")
