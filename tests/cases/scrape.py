"""/metrics of a cluster, as numbers by name and labels."""

import httpx2
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """One reading of /metrics."""

    def __init__(self, text):
        self.values = {
            (sample.name.removeprefix("twophase_"), *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name, **labels):
        return self.values.get((name, *sorted(labels.items())), 0.0)


async def scrape(cluster):
    address = (await cluster.client.status()).http_address
    async with httpx2.AsyncClient() as http:
        reply = await http.get(f"http://{address}/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return Scrape(reply.text)
