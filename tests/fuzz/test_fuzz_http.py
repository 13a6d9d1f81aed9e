"""Nothing that the description of the HTTP endpoint allows, or forbids, ends in a fault."""

import asyncio
import collections
import sys

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.fuzz.neighbours import undisturbed_neighbours
from twophase.client import AsyncClient

TIMEOUT_S = 20.0


async def http_address_of(address):
    async with AsyncClient(address) as client:
        return (await client.status()).http_address


def cases_of(document):
    """Schemathesis cases of every operation, those that generate text most often."""
    schema = schemathesis.openapi.from_dict(document)
    strategies = []
    for found in schema.get_all_operations():
        operation = found.ok()
        modes = [GenerationMode.POSITIVE]
        if operation.method == "post":
            modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] * 3
        strategies += [operation.as_strategy(generation_mode=mode) for mode in modes]
    return st.one_of(strategies)


def test_no_http_request_ends_in_a_fault_and_none_disturbs_running_streams(cluster, num_requests):
    base_url = f"http://{asyncio.run(http_address_of(cluster.address))}"
    document = httpx2.get(f"{base_url}/openapi.json").json()
    statuses = collections.Counter()

    @settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases_of(document))
    def fuzz(case):
        response = case.call(base_url=base_url, timeout=TIMEOUT_S)
        statuses[response.status_code] += 1
        assert response.status_code < 500, response.text
        assert "Traceback" not in response.text

    with undisturbed_neighbours(cluster.address):
        fuzz()
    sys.stdout.write(f"{statuses.total()} HTTP requests: {dict(statuses.most_common())}\n")
    assert statuses.keys() >= {200, 400}
